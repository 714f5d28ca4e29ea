"""Rules by which torch differentiates and batches an operator: its Autograd kernel and its vmap.

Compiled code, torch.func transforms and direct calls of operators use them. Plain calls run the
kernels past them (`torch_private.below_autograd`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.torch_private import any_requires_grad, at_one_level, have_tangents, run_kernel
from ..problem.fields import Field

_LIBRARIES: dict[str, torch.library.Library] = {}
"""By namespace; an operator loses its rules with its library."""


def register_derivative(namespace: str, name: str, differentiable: Callable[..., Any]) -> None:
    """Makes `differentiable` run the calls of an operator that need a derivative of any mode.

    It has the arguments of the operator. Other calls run the kernel.
    """
    operator = _operator(namespace, name)

    def autograd_kernel(keys: Any, *arguments: Any) -> Any:
        if any_requires_grad(arguments) or have_tangents(arguments):
            with at_one_level():
                return differentiable(*arguments)
        return run_kernel(operator, keys, arguments)

    _library(namespace).impl(name, autograd_kernel, "Autograd", with_keyset=True)


def check_no_tangents(arguments: Iterable[object]) -> None:
    """Raises for a backward operator if one of its arguments has a forward-mode tangent."""
    if have_tangents(arguments):
        raise NotImplementedError(
            "the backward kernels have no forward-mode derivative: enter the dual level before the "
            "call of attention, outside of compiled code, or use torch.func.jvp"
        )


class Batch(NamedTuple):
    """Where a tensor of a call has its batch entries."""

    dimension: int | None
    """None if it has none, such as a table that all entries share."""
    broadcasts: bool = False
    """True if the extent may be 1 in place of B."""


ENTRIES = Batch(0)


def batch_of(field: Field) -> Batch:
    """Returns where a field of a call has its batch entries."""
    return Batch(*(field.dimension("B") or (None,)))


def register_vmap(
    namespace: str,
    name: str,
    arguments: Sequence[Batch],
    results: Sequence[Batch],
    is_one_by_one: Callable[[Sequence[Any]], bool],
) -> None:
    """Makes `vmap` fold its examples into the batch of one call of the operator.

    They run one by one if `is_one_by_one` of the arguments, or if they differ in a tensor that has
    no batch entries. `arguments` and `results` are those of the operator; the first argument that
    is `ENTRIES` tells the size of an example's batch.
    """
    operator = _operator(namespace, name)

    def rule(info: Any, in_dims: Sequence[int | None], *given: Any) -> tuple[Any, Any]:
        n = info.batch_size
        calls = list(zip(given, in_dims, arguments, strict=True))
        if is_one_by_one(given) or any(
            dim is not None and argument.dimension is None for _, dim, argument in calls
        ):
            examples = [
                operator(*(_example(x, dim, i) for x, dim, _ in calls)) for i in range(max(n, 1))
            ]
            outputs = [torch.stack(ys)[:n] for ys in zip(*examples, strict=True)]
            return tuple(outputs), (0,) * len(results)
        x, dim, _ = calls[arguments.index(ENTRIES)]
        B = x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]
        folded = operator(*(_folded(x, dim, argument, n, B) for x, dim, argument in calls))
        split = [_split(y, result, n, B) for y, result in zip(folded, results, strict=True)]
        return tuple(y for y, _ in split), tuple(dim for _, dim in split)

    torch.library.register_vmap(f"{namespace}::{name}", rule, lib=_library(namespace))


def _example(x: Any, dim: int | None, i: int) -> Any:
    """Returns example i; zeros if there are no examples, for the shapes of their results."""
    if dim is None:
        return x
    return x.select(dim, i) if x.shape[dim] > 0 else x.sum(dim, dtype=x.dtype)


def _folded(x: Any, dim: int | None, batch: Batch, n: int, B: int) -> Any:
    """Returns x with n B batch entries, or with 1 if it broadcasts and all examples share it.

    A tensor (0,) stands for none.
    """
    if not isinstance(x, Tensor) or batch.dimension is None or x.shape == (0,):
        return x
    place = batch.dimension
    if dim is not None:
        x = x.movedim(dim, place)
    elif batch.broadcasts and x.shape[place] == 1:
        return x
    else:
        x = x.unsqueeze(place)
    shape = list(x.shape)
    shape[place : place + 2] = n, B
    return x.expand(shape).flatten(place, place + 1)


def _split(y: Tensor, batch: Batch, n: int, B: int) -> tuple[Tensor, int | None]:
    """Returns a result and the dimension of its examples; None if they share it."""
    place = batch.dimension
    if place is None or y.shape[place] != n * B:
        return y, None
    return y.unflatten(place, (n, B)), place


def _operator(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name).default


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _LIBRARIES[namespace]
