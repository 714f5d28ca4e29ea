"""`ring_attention`: exact attention over a sequence that is divided over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backends import BACKENDS
from ..dispatch import partial
from ..dispatch.autocast import without_autocast
from ..dispatch.choose import choose
from ..problem import Saved
from ..scores.options import DIFFERENTIABLE
from .gradients import GradientSums
from .plan import Keys, Plan
from .sequence import Piece


def run_ring(plan: Plan, q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Returns (o, lse) of this rank's queries, differentiable once."""
    options = plan.call.problem.tensors()
    plan = _with_tensors(plan, dict.fromkeys(options))
    results: tuple[Tensor, Tensor] = _apply(
        plan, backend, tuple(options), q, k, v, *options.values()
    )
    return results


class RingAttention(torch.autograd.Function):
    """(o, lse), differentiable in q, k, v and the options `DIFFERENTIABLE`.

    Autograd must see the tensors among the options: they are arguments, and `names` are theirs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        backend: str,
        names: tuple[str, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *options: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.call = plan, backend, names
        whole = _with_tensors(plan, dict(zip(names, options, strict=True)))
        total = partial.no_keys(plan.call.problem.shape)
        block_masks: list[Tensor | None] = []
        with without_autocast(q.device.type):
            for _, keys in whole.keys(k, v):
                for rows, columns, problem in whole.rectangles(keys):
                    chosen = choose(problem, backend, BACKENDS)
                    results = partial.forward(chosen, problem, *_inputs(q, keys, rows, columns))
                    partial.add(total, rows.local, results)
                    block_masks.append(results.block_mask)
        o, row_stats = total.o.to(q.dtype), total.row_stats
        # The first tensor tells this call from an undivided one: activation checkpointing, which
        # compares shapes and dtypes, then refuses a recomputation outside of `context_parallel`.
        mark = q.new_empty(0, dtype=torch.uint8)
        ctx.save_for_backward(mark, q, k, v, o, row_stats, *options, *block_masks)
        ctx.set_materialize_grads(False)
        return o, row_stats[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = _gradients(ctx, do, dlse)
        if not torch.is_grad_enabled():  # create_graph=False
            return gradients
        of = [x for x in (*ctx.saved_tensors[1:4], do, dlse) if x is not None]
        return tuple(None if x is None else _once(x, *of) for x in gradients)


@torch.no_grad()
def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the inputs of `RingAttention`."""
    plan, backend, names = ctx.call
    _, q, k, v, o, row_stats, *rest = ctx.saved_tensors
    options, block_masks = rest[: len(names)], iter(rest[len(names) :])
    plan = _with_tensors(plan, dict(zip(names, options, strict=True)))
    needed = zip(names, ctx.needs_input_grad[6:], strict=True)
    wanted = [name for name, needs in needed if needs and name in DIFFERENTIABLE]
    do = torch.zeros_like(o) if do is None else do
    sums = GradientSums(plan, q, k, v, wanted)
    with without_autocast(q.device.type):
        for keys, of_keys in sums.keys(k, v):
            for rows, columns, problem in plan.rectangles(keys):
                at = (slice(None), slice(None), rows.local)
                inputs = _inputs(q, keys, rows, columns)
                saved = Saved(*inputs, o[at], row_stats[:, *at], next(block_masks))
                chosen = choose(problem, backend, BACKENDS)
                gradients = partial.backward(
                    chosen, problem, saved, do[at], None if dlse is None else dlse[at], wanted
                )
                sums.add(rows, columns, gradients, of_keys)
    dq, dk, dv = (
        total.to(x.dtype) for total, x in zip((sums.q, *sums.own), (q, k, v), strict=True)
    )
    of_options = (
        sums.options[name].to(x.dtype) if name in wanted else None
        for name, x in zip(names, options, strict=True)
    )
    return None, None, None, dq, dk, dv, *of_options


class _Once(torch.autograd.Function):
    """A gradient that depends on other tensors, without a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *of: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            "ring_attention is differentiable once; all_to_all_attention is to any order"
        )


_once: Callable[..., Tensor] = _Once.apply
_apply: Callable[..., Any] = RingAttention.apply


def _inputs(q: Tensor, keys: Keys, rows: Piece, columns: Piece) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, :, rows.local], keys.k[:, :, columns.local], keys.v[:, :, columns.local]


def _with_tensors(plan: Plan, tensors: dict[str, Any]) -> Plan:
    problem = plan.call.problem.with_tensors(tensors)
    return replace(plan, call=replace(plan.call, problem=problem))
