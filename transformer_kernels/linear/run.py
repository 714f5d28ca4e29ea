"""Run of a validated call: choice of the backend, and the autograd functions that make its kernels
differentiable, to any order.

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
from ..dispatch.autocast import without_autocast
from ..dispatch.autograd import needs_reference, second_order
from ..dispatch.choose import choose
from ..problem.fields import split
from .backends import Backend, Kernels, ReferenceBackend
from .family import BackwardCall, FamilyProblem


def run(problem: FamilyProblem, backend: str, backends: Sequence[Backend]) -> Any:
    """Returns `Family.Results`, differentiable.

    Raises ValueError if the named backend does not support the problem.
    """
    chosen = choose(problem, backend, backends)
    with without_autocast(problem.shape.device.type):
        return _run(chosen, problem.inputs, problem.options)


def run_steps(problem: FamilyProblem, backend: str, backends: Sequence[Backend]) -> Tensor:
    """Returns the first result and overwrites the state in `problem.inputs` by the final one."""
    chosen = choose(problem, backend, backends)
    with without_autocast(problem.shape.device.type):
        return chosen.steps(problem.inputs, problem.options)


def _run(backend: Backend, x: Any, options: Any) -> Any:
    differentiable = x[: backend.family.differentiable]
    if isinstance(backend, ReferenceBackend) or needs_reference(differentiable):
        return backend.family.reference(_savable(x), options)
    if torch.compiler.is_compiling() or torch_private.functorch_is_active():
        return backend.forward(x, options, differentiable=True)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        return attach(backend, x, options)
    return backend.forward(x, options)


def attach(kernels: Kernels, x: Any, options: Any) -> Any:
    """Runs the forward kernel; returns its results with their backward pass."""
    return kernels.family.Results(*_apply(kernels, options, *_savable(x)))


def _savable(x: Any) -> Any:
    return x._make(None if t is None else savable(t) for t in x)


class Forward(torch.autograd.Function):
    """Forward kernel: `Family.Results`."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, options: Any, *tensors: Tensor | None) -> Any:
        family = kernels.family
        results = kernels.forward(family.Inputs._make(tensors), options)
        saved = (getattr(results, name) for name in family.Saved._fields)
        ctx.save_for_backward(*tensors, *saved)
        ctx.call = kernels, options
        ctx.first = results[0].shape, results[0].dtype
        ctx.mark_non_differentiable(*(getattr(results, name) for name in family.intermediate))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kernels, options = ctx.call
        family = kernels.family
        # once: activation checkpointing refuses to unpack twice
        x, saved = split(ctx.saved_tensors, family.Inputs, family.Saved)
        do, *others = family.with_gradient(output_grads)
        if do is None and all(d is None for d in others):
            return (None,) * len(ctx.needs_input_grad)
        if do is None:
            shape, dtype = ctx.first
            do = x[0].new_zeros(shape, dtype=dtype)
        needed = zip(family.Inputs._fields, ctx.needs_input_grad[2:], strict=True)
        flags = tuple(needs for name, needs in needed if name in family.flagged)
        call = BackwardCall(family.Cotangents(do, *others), saved, x, options, flags)
        # create_graph=True, or is_grads_batched=True
        differentiable = torch.is_grad_enabled() or torch_private.functorch_is_active()
        gradients = kernels.backward(call, differentiable=differentiable)
        return (None, None, *gradients, *(None,) * (len(x) - family.differentiable))


_apply = torch_private.apply_of(Forward)


class Backward(torch.autograd.Function):
    """Backward kernel: `Family.Gradients`, differentiable through the reference."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, options: Any, flags: tuple[bool, ...], *tensors: Tensor | None
    ) -> Any:
        family = kernels.family
        cotangents, saved, x = split(tensors, family.Cotangents, family.Saved, family.Inputs)
        ctx.save_for_backward(*cotangents, *x)
        ctx.call = family, options
        ctx.set_materialize_grads(False)
        return kernels.backward(BackwardCall(cotangents, saved, x, options, flags))

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        family, options = ctx.call
        cotangents, x = split(ctx.saved_tensors, family.Cotangents, family.Inputs)
        n = family.differentiable
        rest = x[n:]

        def function(*primals: Tensor) -> Any:
            results = family.reference(family.Inputs(*primals, *rest), options)
            return family.with_gradient(results)

        grads = second_order(function, x[:n], cotangents, output_grads)
        saved = (None,) * len(family.Saved._fields)
        return None, None, None, *grads[n:], *saved, *grads[:n], *(None,) * len(rest)


_apply_backward = torch_private.apply_of(Backward)


def attach_backward(kernels: Kernels, call: BackwardCall) -> Any:
    """Runs the backward kernel; returns the gradients with their derivative."""
    tensors = *call.cotangents, *call.saved, *call.x
    return kernels.family.Gradients(*_apply_backward(kernels, call.options, call.flags, *tensors))
