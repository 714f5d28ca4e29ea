"""Autograd function that makes the kernels of linear attention differentiable, to any order.

First derivatives use the backend's backward kernel. `create_graph=True`, forward-mode AD and
torch.func transforms use the reference, which plain torch differentiates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels.argument_checks import savable
from transformer_kernels.dispatch.autograd import distinct_objects, is_transformed
from transformer_kernels.linear.backends import Backend, ReferenceLinear
from transformer_kernels.linear.base import LinearBackend
from transformer_kernels.linear.reference import reference_linear_attention
from transformer_kernels.linear.types import (
    DIFFERENTIABLE,
    Inputs,
    LinearState,
    Options,
    Saved,
)


def attend(backend: Backend, x: Inputs, options: Options) -> tuple[Tensor, LinearState]:
    """Returns o and the final state, differentiable in the first six tensors of `Inputs`."""
    differentiable = x[:DIFFERENTIABLE]
    if isinstance(backend, ReferenceLinear) or is_transformed(*differentiable):
        return reference_linear_attention(_savable(x), options)
    needs_grad = any(t is not None and t.requires_grad for t in differentiable)
    if not (needs_grad and torch.is_grad_enabled()):
        results = backend.forward(x, options)
        return results.o, LinearState(results.S, results.z)
    if torch.compiler.is_compiling():
        x = Inputs._make(distinct_objects(x))
    o, S, z = LinearAttention.apply(backend, options, *_savable(x))  # type: ignore[no-untyped-call]
    return o, LinearState(S, z)


def _savable(x: Inputs) -> Inputs:
    return Inputs._make(None if t is None else savable(t) for t in x)


class LinearAttention(torch.autograd.Function):
    """Forward kernel: o and the final state."""

    @staticmethod
    def forward(
        ctx: Any, backend: LinearBackend, options: Options, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        results = backend.forward(Inputs._make(tensors), options)
        ctx.save_for_backward(*tensors, results.o, results.normalizer)
        ctx.call = backend, options
        ctx.set_materialize_grads(False)
        return results.o, results.S, results.z

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dS: Tensor | None, dz: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        backend, options = ctx.call
        count = len(Inputs._fields)
        tensors = ctx.saved_tensors  # once: activation checkpointing refuses to unpack twice
        x, saved = Inputs._make(tensors[:count]), Saved(*tensors[count:])
        no_gradient = (None,) * (count - DIFFERENTIABLE)
        if do is None and dS is None and dz is None:
            return (None, None, *(None,) * count)
        if torch.is_grad_enabled():  # create_graph=True
            return (None, None, *_by_reference(x, options, (do, dS, dz)), *no_gradient)
        do = torch.zeros_like(saved.o) if do is None else do
        wanted = ctx.needs_input_grad[2 + Inputs._fields.index("log_decay")]
        gradients = backend.backward(x, options, saved, do, (dS, dz), log_decay_needs_grad=wanted)
        return (None, None, *gradients, *no_gradient)


def _by_reference(
    x: Inputs, options: Options, output_grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Gradients with a graph of their own: that of the reference.

    Each input is viewed, so that a tensor that is both q and k has two gradients.
    """
    views = [None if t is None else t.view_as(t) for t in x[:DIFFERENTIABLE]]
    needed = [n for n, t in enumerate(views) if t is not None and t.requires_grad]
    o, state = reference_linear_attention(Inputs(*views, *x[DIFFERENTIABLE:]), options)  # type: ignore[arg-type]
    pairs = [(y, g) for y, g in zip((o, *state), output_grads, strict=True) if g is not None]
    inputs = [t for t in views if t is not None and t.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], inputs, [g for _, g in pairs], create_graph=True, allow_unused=True
    )
    found = dict(zip(needed, grads, strict=True))
    return [found.get(n) for n in range(DIFFERENTIABLE)]
