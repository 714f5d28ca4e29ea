"""Arguments of the operators, and recording of those that a call runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from transformer_kernels.problem.fields import FIELDS
from transformer_kernels.scores.options import DIFFERENTIABLE

FORWARD = "transformer_kernels::attention_forward"
BACKWARD = "transformer_kernels::attention_backward"
NOTHING_WANTED = (False,) * (len(DIFFERENTIABLE) + 1)
"""The last arguments of a backward operator: no gradient of an option, not deterministic."""


def operators_run_by(call: Callable[[], object]) -> Counter[str]:
    """Returns how often each operator ran during `call()`, by name ("aten::copy_")."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return Counter(event.name for event in profiler.events())


def operator_arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> dict[str, Any]:
    """Arguments of the forward operators, by name in their order. `given` are options."""
    longest = {"max_seqlen_q": q.shape[2], "max_seqlen_k": k.shape[2]}
    defaults = {field.name: field.default for field in FIELDS} | longest
    assert not given.keys() - defaults.keys()
    return {"q": q, "k": k, "v": v} | defaults | given


FAR = (0, -(1 << 31), -5, 0, 40, 71, 1 << 22, (1 << 31) - 1)
"""Offsets of sequences out of range, and in any order."""


def assert_offsets_are_clamped(
    forward: Callable[..., Any], backward: Callable[..., Any], x: Tensor, side: int
) -> None:
    """Asserts that both passes with q = k = v = x read and write within bounds if cu_seqlens_q
    (side 0) or cu_seqlens_k (1) are out of range."""
    starts = [torch.linspace(0, x.shape[2], len(FAR)).int()] * 2
    starts[side] = torch.tensor(FAR, dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_k")
    given = dict(zip(names, starts, strict=True))
    q, k, v, *options = operator_arguments(x, x, x, **given, bottom_right=True).values()
    o, row_stats, block_mask = forward(q, k, v, *options)
    assert o.isfinite().all()
    grads = backward(q, None, q, k, v, o, row_stats, block_mask, *options, *NOTHING_WANTED)
    assert all(one.isfinite().all() for one in grads)


def assert_declined_if_changed(
    call: Callable[..., str | None], arguments: Sequence[Any], change: Callable[[Tensor], Tensor]
) -> None:
    """Asserts that a direct call runs, and declines if any of its tensors is changed."""
    assert call(*arguments) is None
    for n, x in enumerate(arguments):
        for changed in _changed(x, change):
            assert call(*arguments[:n], changed, *arguments[n + 1 :]), (n, x)


def _changed(x: Any, change: Callable[[Tensor], Tensor]) -> Iterator[Any]:
    """Yields x, a tensor or options, with one of its tensors changed."""
    if isinstance(x, Tensor):
        yield change(x)
    elif isinstance(x, tuple):
        for name, value in zip(x._fields, x, strict=True):  # type: ignore[attr-defined]
            if isinstance(value, Tensor):
                yield x._replace(**{name: change(value)})  # type: ignore[attr-defined]


def assert_own_memory(outputs: Sequence[Tensor]) -> None:
    """torch refuses operators whose outputs share memory, even that of no elements."""
    assert len({x.untyped_storage()._cdata for x in outputs}) == len(outputs)
