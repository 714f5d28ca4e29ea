"""Autograd functions that make the fused kernels differentiable, to any order.

First derivatives use the backend's backward kernel. Higher derivatives, forward-mode AD and
torch.func transforms use the reference implementation, which plain torch differentiates. It is
slower and needs M x N memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from transformer_kernels import torch_private
from transformer_kernels.argument_checks import savable
from transformer_kernels.backends import Backend, FusedBackend, ReferenceBackend
from transformer_kernels.backends.reference import reference_attention, reference_decode
from transformer_kernels.problem import AttentionProblem, KVCache, SavedForBackward, TensorArgs


def attend(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_args: TensorArgs,
    problem: AttentionProblem,
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse), differentiable. Runs the reference under torch.func and forward-mode AD."""
    if isinstance(backend, ReferenceBackend) or _is_transformed(
        q, k, v, tensor_args.bias, tensor_args.alibi_slopes
    ):
        return reference_attention(savable(q), savable(k), savable(v), tensor_args, problem)
    needs_grad = any(x is not None and x.requires_grad for x in (q, k, v, tensor_args.bias))
    if not (needs_grad and torch.is_grad_enabled()):
        o, lse, _ = backend.forward(q, k, v, tensor_args, problem)
        return o, lse
    q, k, v = savable(q), savable(k), savable(v)
    tensor_args = TensorArgs(*(None if x is None else savable(x) for x in tensor_args))
    # torch.compile rejects an autograd.Function with the same tensor in two arguments.
    v = v.view_as(v) if v is q or v is k else v
    k = k.view_as(k) if k is q else k
    if tensor_args.k_segments is not None and tensor_args.k_segments is tensor_args.q_segments:
        tensor_args = tensor_args._replace(
            k_segments=tensor_args.k_segments.view_as(tensor_args.k_segments)
        )
    o, lse = FusedAttention.apply(backend, problem, q, k, v, *tensor_args)  # type: ignore[no-untyped-call]
    return o, lse


def decode(
    backend: Backend, q: Tensor, cache: KVCache, problem: AttentionProblem
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse). Runs the reference, the only differentiable backend, under transforms."""
    if isinstance(backend, ReferenceBackend) or _is_transformed(
        q, cache.k, cache.v, cache.alibi_slopes
    ):
        return reference_decode(q, cache, problem)
    return backend.decode(q, cache, problem)


def _is_transformed(*tensors: Tensor | None) -> bool:
    """True inside a torch.func transform, or if a tensor has a forward-mode tangent."""
    if torch.compiler.is_compiling():
        return False
    if torch_private.functorch_is_active():
        return True
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


class FusedAttention(torch.autograd.Function):
    """Forward kernel: (o, lse), differentiable in q, k, v and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: FusedBackend,
        problem: AttentionProblem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensor_args: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        o, lse, block_mask = backend.forward(q, k, v, TensorArgs(*tensor_args), problem)
        ctx.save_for_backward(q, k, v, o, lse, block_mask, *tensor_args)
        ctx.backend, ctx.problem = backend, problem
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        do, dlse = output_grads
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, o, lse, block_mask, *tensor_args = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        saved = SavedForBackward(q, k, v, o, lse, block_mask)
        grads = first_order(
            ctx.backend,
            ctx.problem,
            do,
            dlse,
            saved,
            TensorArgs(*tensor_args),
            ctx.needs_input_grad[5],
        )
        return None, None, *grads, *(None,) * (len(tensor_args) - 1)


def first_order(
    backend: FusedBackend,
    problem: AttentionProblem,
    do: Tensor,
    dlse: Tensor | None,
    saved: SavedForBackward,
    tensor_args: TensorArgs,
    bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns (dq, dk, dv, dbias), differentiable themselves under `create_graph=True`."""
    if torch.is_grad_enabled():
        grads: tuple[Tensor, Tensor, Tensor, Tensor | None] = FusedAttentionBackward.apply(  # type: ignore[no-untyped-call]
            backend, problem, bias_needs_grad, do, dlse, *saved, *tensor_args
        )
        return grads
    return backend.backward(do, dlse, saved, tensor_args, problem, bias_needs_grad=bias_needs_grad)


class FusedAttentionBackward(torch.autograd.Function):
    """Backward kernel: (dq, dk, dv, dbias), differentiable through the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: FusedBackend,
        problem: AttentionProblem,
        bias_needs_grad: bool,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        block_mask: Tensor | None,
        *tensor_args: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        ctx.save_for_backward(do, dlse, q, k, v, *tensor_args)
        ctx.problem, ctx.bias_needs_grad = problem, bias_needs_grad
        ctx.set_materialize_grads(False)
        saved = SavedForBackward(q, k, v, o.detach(), lse.detach(), block_mask)
        return backend.backward(
            do, dlse, saved, TensorArgs(*tensor_args), problem, bias_needs_grad=bias_needs_grad
        )

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        do, dlse, q, k, v, *rest = ctx.saved_tensors
        ddo, ddlse, ddq, ddk, ddv, ddbias = _second_order(
            do, dlse, q, k, v, TensorArgs(*rest), ctx.problem, ctx.bias_needs_grad, output_grads
        )
        return (
            None, None, None, ddo, ddlse, ddq, ddk, ddv, None, None, None, ddbias,
            *(None,) * (len(rest) - 1),
        )  # fmt: skip


def _second_order(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_args: TensorArgs,
    problem: AttentionProblem,
    bias_needs_grad: bool,
    output_grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Gradients of <(dq, dk, dv, dbias), output_grads> in do, dlse, q, k, v and bias.

    o and lse depend on q, k, v and bias, so the reference rebuilds the first-order graph from them.
    In grad mode (`create_graph=True`) the result is differentiable again.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        do, q, k, v = (_distinct(x, create_graph) for x in (do, q, k, v))
        dlse = None if dlse is None else _distinct(dlse, create_graph)
        bias = None if tensor_args.bias is None else _distinct(tensor_args.bias, create_graph)
        o, lse = reference_attention(q, k, v, tensor_args._replace(bias=bias), problem)
        first = torch.autograd.grad(
            [o] if dlse is None else [o, lse],
            [q, k, v, bias] if bias is not None and bias_needs_grad else [q, k, v],
            [do] if dlse is None else [do, dlse],
            create_graph=True,
            materialize_grads=True,
        )
        pairs = [(g, c) for g, c in zip(first, output_grads, strict=False) if c is not None]
        inputs = [do, dlse, q, k, v, bias]
        second = torch.autograd.grad(
            [g for g, _ in pairs],
            [x for x in inputs if x is not None],
            [c for _, c in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    grads = iter(second)
    return [None if x is None else next(grads) for x in inputs]


def _distinct(x: Tensor, keep_graph: bool) -> Tensor:
    """Returns a distinct tensor object, so that a tensor used as both q and k has two gradients."""
    return x.view_as(x) if keep_graph and x.requires_grad else x.detach().requires_grad_()
