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
    batch_of,
    check_no_tangents,
    register_derivative,
    register_vmap,
)
from ..problem.types import accumulate_dtype
from .autograd import attach, attach_backward
from .base import LinearKernels, Names
from .operators import BACKWARD_FIELDS, FIELDS, register_fakes, unpack, unpack_backward
from .reference import reference_linear_attention
from .triton.operators import NAMES
from .types import Gradients, Results


class _Registered(LinearKernels):
    """The kernels of three operators in a namespace."""

    def __init__(self, namespace: str, names: Names) -> None:
        self.namespace, self.names = namespace, names

    def operators(self, device: torch.device) -> Any:
        return getattr(torch.ops, self.namespace)

    def with_derivative(self, *arguments: Any) -> tuple[Tensor, ...]:
        x, options = unpack(arguments)
        if not have_tangents(x):
            return attach(self, x, options)
        o, state = reference_linear_attention(x, options)
        normalizer = x.q.new_zeros(
            x.q.shape[:3] if options.normalize else (0,), dtype=accumulate_dtype(x.q.dtype)
        )
        return o, normalizer, *state

    def backward_with_derivative(self, *arguments: Any) -> tuple[Tensor, ...]:
        check_no_tangents(arguments)
        return attach_backward(self, unpack_backward(arguments)).outputs()


def register_linear(namespace: str) -> None:
    """Tells torch all that it needs to know of the compiled operators in a namespace."""
    register_fakes(namespace)
    _register(namespace, LinearKernels.names)


def _register(namespace: str, names: Names) -> None:
    """Makes operators differentiable, and defines their vmap."""
    if MISSING_FOR_OPERATORS:
        return
    kernels = _Registered(namespace, names)
    register_derivative(namespace, names.forward, kernels.with_derivative)
    register_derivative(namespace, names.backward, kernels.backward_with_derivative)
    register_derivative(namespace, names.steps, _refuse)
    register_vmap(
        namespace,
        names.forward,
        [batch_of(field) for field in FIELDS],
        [ENTRIES] * len(Results._fields),
        lambda arguments: unpack(arguments)[0].cu_seqlens is not None,
    )
    register_vmap(
        namespace,
        names.backward,
        [batch_of(field) for field in BACKWARD_FIELDS],
        [ENTRIES] * len(Gradients._fields),
        lambda arguments: unpack_backward(arguments).x.cu_seqlens is not None,
    )


def _refuse(*arguments: Any) -> Tensor:
    raise NotImplementedError(
        "linear_attention_decode has no derivative: call it under torch.no_grad(), or use "
        "linear_attention()"
    )


if extension.unavailable_reason() is None:
    register_linear(NAMESPACE)
_register(NAMESPACE, NAMES)
