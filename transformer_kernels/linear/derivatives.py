"""Derivatives and vmap of the operators of linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.native import extension
from ..common.namespace import NAMESPACE
from ..common.torch_private import MISSING_FOR_OPERATORS, have_tangents
from ..dispatch.operator_rules import (
    ENTRIES,
    Batch,
    check_no_tangents,
    register_derivative,
    register_vmap,
)
from ..problem.types import accumulate_dtype
from .autograd import attach, attach_backward
from .base import LinearKernels, LinearOperators
from .operators import register_fakes
from .reference import reference_linear_attention
from .triton.operators import OPERATORS
from .types import Inputs, Options, Saved

_COUNT = len(Inputs._fields)
_CU_SEQLENS = Inputs._fields.index("cu_seqlens")
_NUMBER = Batch(None)
_INPUTS = [_NUMBER if name == "cu_seqlens" else ENTRIES for name in Inputs._fields]
_OPTIONS = [_NUMBER] * 4


class _Registered(LinearKernels):
    """Given operators."""

    def __init__(self, operators: LinearOperators) -> None:
        self.given = operators

    def operators(self, device: torch.device) -> LinearOperators:
        return self.given

    def with_derivative(self, *arguments: Any) -> tuple[Tensor, ...]:
        x, options = Inputs._make(arguments[:_COUNT]), Options.unpack(arguments[_COUNT:])
        if not have_tangents(x):
            return attach(self, x, options)
        o, state = reference_linear_attention(x, options)
        normalizer = x.q.new_zeros(
            x.q.shape[:3] if options.normalize else (0,), dtype=accumulate_dtype(x.q.dtype)
        )
        return o, normalizer, *state

    def backward_with_derivative(self, *arguments: Any) -> tuple[Tensor, ...]:
        check_no_tangents(arguments)
        cotangents, saved, rest = arguments[:3], Saved(*arguments[3:5]), arguments[5:]
        x, options = Inputs._make(rest[:_COUNT]), Options.unpack(rest[_COUNT:-1])
        gradients = attach_backward(
            self, x, options, saved, cotangents, log_decay_needs_grad=rest[-1]
        )
        return tuple(x.q.new_empty(0) if g is None else g for g in gradients)


def register_linear(namespace: str) -> None:
    """Tells torch all that it needs to know of the compiled operators in a namespace."""
    register_fakes(namespace)
    _register(namespace, LinearOperators.of(getattr(torch.ops, namespace)))


def _register(namespace: str, operators: LinearOperators) -> None:
    """Makes operators differentiable, and defines their vmap. Their names are in `operators`."""
    if MISSING_FOR_OPERATORS:
        return
    kernels = _Registered(operators)
    forward, backward, steps = (operator._schema.name.split("::")[1] for operator in operators)
    register_derivative(namespace, forward, kernels.with_derivative)
    register_derivative(namespace, backward, kernels.backward_with_derivative)
    register_derivative(namespace, steps, _refuse)
    results = [ENTRIES] * 4
    register_vmap(
        namespace, forward, [*_INPUTS, *_OPTIONS], results, lambda x: x[_CU_SEQLENS] is not None
    )
    register_vmap(
        namespace,
        backward,
        [*[ENTRIES] * 5, *_INPUTS, *_OPTIONS, _NUMBER],
        [ENTRIES] * 6,
        lambda arguments: arguments[5 + _CU_SEQLENS] is not None,
    )


def _refuse(*arguments: Any) -> Tensor:
    raise NotImplementedError(
        "linear_attention_decode has no derivative: call it under torch.no_grad(), or use "
        "linear_attention()"
    )


if extension.unavailable_reason() is None:
    register_linear(NAMESPACE)
_register(NAMESPACE, OPERATORS)
