"""Autograd functions that make the fused kernels differentiable, to any order.

First derivatives use the backend's backward kernel. Higher derivatives and forward-mode AD use the
reference implementation, which plain torch differentiates. It is slower and needs M x N memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import Backend, ReferenceBackend
from ..backends.base import Gradients, Kernels, Outputs
from ..backends.reference import reference_attention
from ..common import torch_private
from ..common.argument_checks import savable
from ..problem import Problem, Saved
from ..problem.pages import without_pages
from ..scores.options import DIFFERENTIABLE, PLAIN_SCORES

_Names = tuple[str, ...]


def run_kernels(
    backend: Backend, problem: Problem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse), differentiable."""
    scores = problem.scores
    options: list[Tensor | None] = []
    if scores is not PLAIN_SCORES:
        options = [getattr(scores, name) for name in DIFFERENTIABLE]
    tensors = (q, k, v, scores.alibi_slopes, *options)
    fused = None if isinstance(backend, ReferenceBackend) else backend
    if needs_reference(tensors):
        fused = None
    is_transformed = torch_private.functorch_is_active()
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or any(x is not None and x.requires_grad for x in options)
    )
    if problem.layout.has_packed_pages and (
        fused is None or not fused.reads_packed_pages or needs_grad or is_transformed
    ):
        problem, k, v = without_pages(problem, k, v)
    if fused is None:
        return reference_attention(problem, savable(q), savable(k), savable(v))
    if torch.compiler.is_compiling() or is_transformed:
        o, row_stats, _ = fused.forward(problem, q, k, v, differentiable=True)
    elif needs_grad:
        o, row_stats, _ = attach(fused, problem, None, q, k, v)
    else:
        o, row_stats, _ = fused.forward(problem, q, k, v)
    return o, row_stats[0]


def attach(
    backend: Kernels,
    problem: Problem,
    computed: Outputs | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Any:
    """Returns what `FusedAttention.apply` returns: results with their backward pass. o alone if it
    is `computed`."""
    options = problem.tensors()
    tensors = [q, k, v, *options.values()]
    if any(map(Tensor.is_inference, tensors)):
        tensors = [savable(x) for x in tensors]
    is_whole = computed is not None
    if not is_whole:
        problem = problem.with_tensors(dict.fromkeys(options))
    return _apply(backend, problem, is_whole, tuple(options), computed, *tensors)


def needs_reference(tensors: Iterable[Tensor | None] = ()) -> bool:
    """True if a call needs derivatives that the kernels lack: in forward mode, or of higher order
    in torch.func. Operators in compiled code find forward-mode tangents themselves."""
    is_compiling = torch.compiler.is_compiling()
    if not (is_compiling or torch_private.functorch_is_active()):
        return torch_private.have_tangents(tensors)
    if torch_private.MISSING_FOR_OPERATORS:
        return True
    transforms = torch_private.transforms()
    if "Jvp" in transforms or transforms.count("Grad") > 1:
        return True
    return not is_compiling and torch_private.forward_ad_is_active()


class FusedAttention(torch.autograd.Function):
    """Forward kernel: `Outputs`, differentiable in q, k, v and the options `DIFFERENTIABLE`; o
    alone in a call of a fast path.

    Autograd must see the tensors among the options: they are arguments, and `names` are theirs.
    `problem` lacks them, except if it `is_whole`, in a fast path: taking them out costs time.
    `computed` are the outputs of a direct call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        backend: Kernels,
        problem: Problem,
        is_whole: bool,
        names: _Names,
        computed: Outputs | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *options: Tensor,
    ) -> Tensor | Outputs:
        outputs = computed
        if outputs is None:
            whole = problem if is_whole else _joined(problem, names, options)
            outputs = backend.forward(whole, q, k, v)
        o, row_stats, block_mask = outputs
        ctx.save_for_backward(q, k, v, o, row_stats, block_mask, *options)
        ctx.call = backend, problem, names, is_whole
        if is_whole:
            return o
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, drow_stats: Tensor | None = None, _: None = None
    ) -> tuple[Tensor | None, ...]:
        dlse = None if drow_stats is None else drow_stats[0]
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, o, row_stats, block_mask, *options = ctx.saved_tensors
        saved = Saved(q, k, v, o, row_stats, block_mask)
        do = torch.zeros_like(o) if do is None else do
        backend, problem, names, is_whole = ctx.call
        wanted = _wanted(names, ctx.needs_input_grad)
        problem = problem if is_whole else _joined(problem, names, options)
        # create_graph=True, or is_grads_batched=True
        differentiable = torch.is_grad_enabled() or torch_private.functorch_is_active()
        dq, dk, dv, *computed = backend.backward(
            problem, saved, do, dlse, wanted=wanted, differentiable=differentiable
        )
        if not wanted:
            return None, None, None, None, None, dq, dk, dv, *(None,) * len(names)
        of_options = dict(zip(DIFFERENTIABLE, computed, strict=True))
        option_grads = [of_options.get(name) for name in names]
        return None, None, None, None, None, dq, dk, dv, *option_grads


_apply = torch_private.apply_of(FusedAttention)
"""For calls outside torch.func transforms, and for the Autograd kernels of operators."""


def attach_plain(
    backend: Kernels,
    problem: Problem,
    computed: Outputs | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: _Names,
    *options: Tensor,
) -> Tensor:
    """Runs the forward kernel unless its outputs are `computed`; returns o with its backward pass.
    For the fast path: no transform, no inference tensors, and `options` are all tensors of the
    problem, by `names`."""
    o: Tensor = _apply(backend, problem, True, names, computed, q, k, v, *options)
    return o


def attach_backward(
    backend: Kernels,
    problem: Problem,
    saved: Saved,
    do: Tensor,
    dlse: Tensor | None,
    wanted: _Names,
) -> Gradients:
    """Runs the backward kernel; returns the gradients with their derivative."""
    options = {name: savable(x) for name, x in problem.tensors().items()}
    problem = problem.with_tensors(dict.fromkeys(options))
    call = backend, problem, tuple(options), wanted
    return Gradients(*_apply_backward(*call, do, dlse, *saved, *options.values()))


class FusedAttentionBackward(torch.autograd.Function):
    """Backward kernel: `Gradients`, differentiable through the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Kernels,
        problem: Problem,
        names: _Names,
        wanted: _Names,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        row_stats: Tensor,
        block_mask: Tensor | None,
        *options: Tensor,
    ) -> Gradients:
        ctx.save_for_backward(do, dlse, q, k, v, *options)
        ctx.problem, ctx.names, ctx.wanted = problem, names, wanted
        ctx.set_materialize_grads(False)
        saved = Saved(q, k, v, o.detach(), row_stats, block_mask)
        problem = _joined(problem, names, options)
        return backend.backward(problem, saved, do, dlse, wanted=wanted)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        do, dlse, q, k, v, *options = ctx.saved_tensors
        problem = _joined(ctx.problem, ctx.names, options)
        grads = _second_order(problem, do, dlse, q, k, v, ctx.wanted, output_grads)
        ddo, ddlse, ddq, ddk, ddv = (grads.get(name) for name in ("do", "dlse", "q", "k", "v"))
        option_grads = [grads.get(name) for name in ctx.names]
        return (None, None, None, None, ddo, ddlse, ddq, ddk, ddv, None, None, None, *option_grads)


_apply_backward = torch_private.apply_of(FusedAttentionBackward)


def _wanted(names: _Names, needs_input_grad: Sequence[bool]) -> _Names:
    """Names of the options, the last inputs, whose gradients kernels compute and autograd wants."""
    if not names or not any(needs_input_grad[-len(names) :]):
        return ()
    needed = zip(names, needs_input_grad[-len(names) :], strict=True)
    return tuple(name for name, needs in needed if needs and name in DIFFERENTIABLE)


def _joined(problem: Problem, names: _Names, tensors: Sequence[Tensor]) -> Problem:
    return problem.with_tensors(dict(zip(names, tensors, strict=True))) if names else problem


def _second_order(
    problem: Problem,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    wanted: _Names,
    output_grads: Sequence[Tensor | None],
) -> dict[str, Tensor | None]:
    """Gradients of <gradients, output_grads>, by the names of the inputs."""
    options = {name: getattr(problem.scores, name) for name in DIFFERENTIABLE}

    def function(q: Tensor, k: Tensor, v: Tensor, *options: Tensor | None) -> tuple[Tensor, ...]:
        named = dict(zip(DIFFERENTIABLE, options, strict=True))
        return reference_attention(problem.with_tensors(named), q, k, v)

    of_options = [
        grad if name in wanted else None
        for name, grad in zip(DIFFERENTIABLE, output_grads[3:], strict=True)
    ]
    primals = (q, k, v, *options.values())
    grads = second_order(function, primals, (do, dlse), (*output_grads[:3], *of_options))
    return dict(zip(("q", "k", "v", *DIFFERENTIABLE, "do", "dlse"), grads, strict=True))


def second_order(
    function: Callable[..., Sequence[Tensor]],
    primals: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    output_grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of <gradients of the primals, output_grads> in the primals and cotangents.

    The first-order graph is rebuilt from `function`, which plain torch differentiates, because its
    results depend on the primals too. In grad mode (`create_graph=True`) the result is
    differentiable again. A cotangent that is None is zero, as is an output_grad.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        x = [None if t is None else _distinct(t, create_graph) for t in (*primals, *cotangents)]
        inputs, given = x[: len(primals)], x[len(primals) :]
        values, of_values = _with_gradients(function(*inputs), given)
        wanted, of_wanted = _with_gradients(inputs, output_grads)
        if not wanted:
            return [None] * len(x)
        grads = torch.autograd.grad(
            values, wanted, of_values, create_graph=True, materialize_grads=True
        )
        first = [g if g.requires_grad else None for g in grads]  # else it does not depend on x
        values, of_values = _with_gradients(first, of_wanted)
        present = [t for t in x if t is not None]
        second = iter(
            torch.autograd.grad(
                values, present, of_values, create_graph=create_graph, allow_unused=True
            )
        )
    return [None if t is None else next(second) for t in x]


def _with_gradients(
    x: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns the tensors that have a gradient, and their gradients."""
    pairs = [(t, g) for t, g in zip(x, grads, strict=True) if t is not None and g is not None]
    return [t for t, _ in pairs], [g for _, g in pairs]


def _distinct(x: Tensor, keep_graph: bool) -> Tensor:
    """Returns a distinct tensor object, so that a tensor used as both q and k has two gradients."""
    return x.view_as(x) if keep_graph and x.requires_grad else x.detach().requires_grad_()
