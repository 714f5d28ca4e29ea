"""Autograd functions that make the kernels of linear attention differentiable, to any order.

First derivatives use the backend's backward kernel. Higher derivatives and forward-mode AD use the
reference, which plain torch differentiates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..common import torch_private
from ..common.argument_checks import savable
from ..dispatch.autograd import needs_reference, second_order
from ..problem.fields import split
from .backends import Backend, ReferenceLinear
from .base import LinearKernels
from .reference import reference_linear_attention
from .types import (
    DIFFERENTIABLE,
    BackwardCall,
    Cotangents,
    Gradients,
    Inputs,
    LinearState,
    Options,
    Results,
    Saved,
)


def run_kernels(backend: Backend, x: Inputs, options: Options) -> tuple[Tensor, LinearState]:
    """Returns o and the final state, differentiable in the first six tensors of `Inputs`."""
    differentiable = x[:DIFFERENTIABLE]
    if isinstance(backend, ReferenceLinear) or needs_reference(differentiable):
        return reference_linear_attention(_savable(x), options)
    if torch.compiler.is_compiling() or torch_private.functorch_is_active():
        results = backend.forward(x, options, differentiable=True)
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        results = attach(backend, x, options)
    else:
        results = backend.forward(x, options)
    return results.o, LinearState(results.S, results.z)


def attach(backend: LinearKernels, x: Inputs, options: Options) -> Results:
    """Runs the forward kernel; returns its results with their backward pass."""
    return Results(*_apply(backend, options, *_savable(x)))


def _savable(x: Inputs) -> Inputs:
    return Inputs._make(None if t is None else savable(t) for t in x)


class LinearAttention(torch.autograd.Function):
    """Forward kernel: `Results`."""

    @staticmethod
    def forward(
        ctx: Any, backend: LinearKernels, options: Options, *tensors: Tensor | None
    ) -> Results:
        results = backend.forward(Inputs._make(tensors), options)
        ctx.save_for_backward(*tensors, results.o, results.normalizer)
        ctx.call = backend, options
        ctx.mark_non_differentiable(results.normalizer)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, _: None, dS: Tensor | None, dz: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        backend, options = ctx.call
        # once: activation checkpointing refuses to unpack twice
        x, saved = split(ctx.saved_tensors, Inputs, Saved)
        if do is None and dS is None and dz is None:
            return (None,) * len(ctx.needs_input_grad)
        cotangents = Cotangents(torch.zeros_like(saved.o) if do is None else do, dS, dz)
        wanted = ctx.needs_input_grad[2 + Inputs._fields.index("log_decay")]
        call = BackwardCall(cotangents, saved, x, options, wanted)
        # create_graph=True, or is_grads_batched=True
        differentiable = torch.is_grad_enabled() or torch_private.functorch_is_active()
        gradients = backend.backward(call, differentiable=differentiable)
        return (None, None, *gradients, *(None,) * (len(x) - DIFFERENTIABLE))


_apply = torch_private.apply_of(LinearAttention)


class LinearAttentionBackward(torch.autograd.Function):
    """Backward kernel: `Gradients`, differentiable through the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: LinearKernels,
        options: Options,
        log_decay_needs_grad: bool,
        *tensors: Tensor | None,
    ) -> Gradients:
        cotangents, saved, x = split(tensors, Cotangents, Saved, Inputs)
        ctx.save_for_backward(*cotangents, *x)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return backend.backward(BackwardCall(cotangents, saved, x, options, log_decay_needs_grad))

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cotangents, x = split(ctx.saved_tensors, Cotangents, Inputs)
        primals, rest = x[:DIFFERENTIABLE], x[DIFFERENTIABLE:]

        def function(*primals: Tensor) -> Sequence[Tensor]:
            o, state = reference_linear_attention(Inputs(*primals, *rest), ctx.options)
            return o, *state

        grads = second_order(function, primals, cotangents, output_grads)
        of_inputs, of_cotangents = grads[:DIFFERENTIABLE], grads[DIFFERENTIABLE:]
        return None, None, None, *of_cotangents, None, None, *of_inputs, *(None,) * len(rest)


_apply_backward = torch_private.apply_of(LinearAttentionBackward)


def attach_backward(backend: LinearKernels, call: BackwardCall) -> Gradients:
    """Runs the backward kernel; returns the gradients with their derivative."""
    tensors = *call.cotangents, *call.saved, *call.x
    return Gradients(*_apply_backward(backend, call.options, call.log_decay_needs_grad, *tensors))
