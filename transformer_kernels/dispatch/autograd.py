"""Autograd functions that make the fused kernels differentiable, to any order.

First derivatives use the backend's backward kernel. Higher derivatives, forward-mode AD and
torch.func transforms use the reference implementation, which plain torch differentiates. It is
slower and needs M x N memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from transformer_kernels import torch_private
from transformer_kernels.argument_checks import savable
from transformer_kernels.backends import Backend, FusedBackend, ReferenceBackend
from transformer_kernels.backends.base import Gradients, Outputs
from transformer_kernels.backends.reference import reference_attention
from transformer_kernels.problem import Problem, Saved
from transformer_kernels.scores.options import DIFFERENTIABLE, PLAIN_SCORES

_Names = tuple[str, ...]
_Tensor = TypeVar("_Tensor", Tensor, Tensor | None)


def attend(
    backend: Backend, problem: Problem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse), differentiable. Runs the reference under torch.func and forward-mode AD."""
    scores = problem.scores
    options: list[Tensor | None] = []
    if scores is not PLAIN_SCORES:
        options = [getattr(scores, name) for name in DIFFERENTIABLE]
    if isinstance(backend, ReferenceBackend) or is_transformed(
        q, k, v, scores.alibi_slopes, *options
    ):
        return reference_attention(problem, savable(q), savable(k), savable(v))
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or any(x is not None and x.requires_grad for x in options)
    )
    if not needs_grad:
        o, lse, _ = backend.forward(problem, q, k, v)
        return o, lse
    o, lse = attach(backend, problem, None, q, k, v)
    return o, lse


def attach(
    backend: FusedBackend,
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
    apply = _apply
    if computed is None and torch.compiler.is_compiling():
        apply, tensors = FusedAttention.apply, distinct_objects(tensors)
    elif any(map(Tensor.is_inference, tensors)):
        tensors = [savable(x) for x in tensors]
    is_whole = computed is not None
    if not is_whole:
        problem = problem.with_tensors(dict.fromkeys(options))
    return apply(backend, problem, is_whole, tuple(options), computed, *tensors)


def distinct_objects(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    """Views a tensor that occurs again: torch.compile rejects an autograd.Function with the same
    tensor in two arguments."""
    distinct: list[_Tensor] = []
    for x in tensors:
        occurs = any(x is other for other in distinct)
        distinct.append(x.view_as(x) if x is not None and occurs else x)
    return distinct


def is_transformed(*tensors: Tensor | None) -> bool:
    """True inside a torch.func transform, or if a tensor has a forward-mode tangent."""
    if torch.compiler.is_compiling():
        return False
    if torch_private.functorch_is_active():
        return True
    if not torch_private.forward_ad_is_active():
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


class FusedAttention(torch.autograd.Function):
    """Forward kernel: (o, lse), differentiable in q, k, v and the options `DIFFERENTIABLE`; o alone
    in a call of a fast path.

    Autograd must see the tensors among the options: they are arguments, and `names` are theirs.
    `problem` lacks them, except if it `is_whole`, in a fast path: taking them out costs time.
    `computed` are the outputs of a direct call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        backend: FusedBackend,
        problem: Problem,
        is_whole: bool,
        names: _Names,
        computed: Outputs | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *options: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        outputs = computed
        if outputs is None:
            whole = problem if is_whole else _joined(problem, names, options)
            outputs = backend.forward(whole, q, k, v)
        o, lse, block_mask = outputs
        ctx.save_for_backward(q, k, v, o, lse, block_mask, *options)
        ctx.call = backend, problem, names, is_whole
        if is_whole:
            return o
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, o, lse, block_mask, *options = ctx.saved_tensors
        saved = Saved(q, k, v, o, lse, block_mask)
        do = torch.zeros_like(o) if do is None else do
        backend, problem, names, is_whole = ctx.call
        wanted = _wanted(names, ctx.needs_input_grad)
        if torch.is_grad_enabled():  # create_graph=True
            call = backend, problem, names, wanted
            grads = FusedAttentionBackward.apply(*call, do, dlse, *saved, *options)  # type: ignore[no-untyped-call]
        else:
            problem = problem if is_whole else _joined(problem, names, options)
            grads = backend.backward(problem, saved, do, dlse, wanted=wanted)
        dq, dk, dv, *computed = grads
        if not wanted:
            return None, None, None, None, None, dq, dk, dv, *(None,) * len(names)
        of_options = dict(zip(DIFFERENTIABLE, computed, strict=True))
        option_grads = [of_options.get(name) for name in names]
        return None, None, None, None, None, dq, dk, dv, *option_grads


_apply = torch_private.apply_of(FusedAttention)
"""For calls outside torch.func transforms: `attend` runs the reference inside them."""


def attach_plain(
    backend: FusedBackend,
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: _Names,
    *options: Tensor,
) -> Tensor:
    """Runs the forward kernel; returns o with its backward pass. For the fast path: no transform,
    no inference tensors, and `options` are all tensors of the problem, by `names`."""
    o: Tensor = _apply(backend, problem, True, names, None, q, k, v, *options)
    return o


class FusedAttentionBackward(torch.autograd.Function):
    """Backward kernel: `Gradients`, differentiable through the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: FusedBackend,
        problem: Problem,
        names: _Names,
        wanted: _Names,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        block_mask: Tensor | None,
        *options: Tensor,
    ) -> Gradients:
        ctx.save_for_backward(do, dlse, q, k, v, *options)
        ctx.problem, ctx.names, ctx.wanted = problem, names, wanted
        ctx.set_materialize_grads(False)
        saved = Saved(q, k, v, o.detach(), lse.detach(), block_mask)
        problem = _joined(problem, names, options)
        return backend.backward(problem, saved, do, dlse, wanted=wanted)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        do, dlse, q, k, v, *options = ctx.saved_tensors
        problem = _joined(ctx.problem, ctx.names, options)
        grads = _second_order(problem, do, dlse, q, k, v, ctx.wanted, output_grads)
        ddo, ddlse, ddq, ddk, ddv = (grads.get(name) for name in ("do", "dlse", "q", "k", "v"))
        option_grads = [grads.get(name) for name in ctx.names]
        return (
            None, None, None, None, ddo, ddlse, ddq, ddk, ddv, None, None, None, *option_grads,
        )  # fmt: skip


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
    """Gradients of <gradients, output_grads>, by the names of the inputs.

    o and lse depend on q, k, v and the options, so the reference rebuilds the first-order graph.
    In grad mode (`create_graph=True`) the result is differentiable again.
    """
    create_graph = torch.is_grad_enabled()
    options = {name: getattr(problem.scores, name) for name in DIFFERENTIABLE}
    inputs = ("q", "k", "v", *wanted)
    given = {"do": do, "dlse": dlse, "q": q, "k": k, "v": v, **options}
    with torch.enable_grad():
        x = {n: _distinct(t, create_graph) for n, t in given.items() if t is not None}
        rebuilt = problem.with_tensors({name: x.get(name) for name in options})
        outputs = reference_attention(rebuilt, x["q"], x["k"], x["v"])
        first = torch.autograd.grad(
            outputs if "dlse" in x else outputs[:1],
            [x[name] for name in inputs],
            [x[name] for name in ("do", "dlse") if name in x],
            create_graph=True,
            materialize_grads=True,
        )
        given_grads = dict(zip(("q", "k", "v", *DIFFERENTIABLE), output_grads, strict=True))
        cotangents = [given_grads[name] for name in inputs]
        pairs = [(g, c) for g, c in zip(first, cotangents, strict=True) if c is not None]
        second = torch.autograd.grad(
            [g for g, _ in pairs],
            list(x.values()),
            [c for _, c in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    return dict(zip(x, second, strict=True))


def _distinct(x: Tensor, keep_graph: bool) -> Tensor:
    """Returns a distinct tensor object, so that a tensor used as both q and k has two gradients."""
    return x.view_as(x) if keep_graph and x.requires_grad else x.detach().requires_grad_()
