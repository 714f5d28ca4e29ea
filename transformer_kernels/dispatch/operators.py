"""Derivatives and vmap of the operators of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import schema
from ..backends.base import Kernels
from ..backends.native import extension
from ..backends.reference import reference_attention
from ..backends.triton import TritonBackend
from ..common.namespace import NAMESPACE
from ..common.torch_private import MISSING_FOR_OPERATORS, have_tangents
from ..problem import Problem, Saved, unpack
from ..problem.fields import FIELDS
from ..problem.pages import without_pages
from ..scores.options import DIFFERENTIABLE
from .autograd import attach, attach_backward
from .operator_rules import (
    ENTRIES,
    Batch,
    batch_of,
    check_no_tangents,
    register_derivative,
    register_vmap,
)

_OPTIONS = tuple(field.name for field in FIELDS)
_NUMBER = Batch(None)
_ROW_STATS, _BLOCK_MASK = Batch(1), Batch(0, broadcasts=True)


class _Registered(Kernels):
    """The kernels of two operators in a namespace."""

    def __init__(self, namespace: str, names: tuple[str, str]) -> None:
        self.namespace = namespace
        self.forward_name, self.backward_name = names

    def operators(self, device: torch.device) -> Any:
        return getattr(torch.ops, self.namespace)

    def with_derivative(
        self, q: Tensor, k: Tensor, v: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        problem, block_mask = unpack(q, k, v, options), None
        slopes = problem.scores.alibi_slopes  # the kernels have no gradient of them
        if have_tangents((q, k, v, *options)) or (slopes is not None and slopes.requires_grad):
            if problem.layout.has_packed_pages:
                problem, k, v = without_pages(problem, k, v)
            o, lse = reference_attention(problem, q, k, v)
            is_cache = problem.kind == "cache"
            row_stats = torch.stack([lse] if is_cache else [lse, torch.zeros_like(lse)])
        else:
            _check_has_backward(problem)
            o, row_stats, block_mask = attach(self, problem, None, q, k, v)
        if block_mask is None:
            shape = problem.mask.block_mask_shape(problem.shape.M, problem.shape.N)
            block_mask = q.new_zeros(shape, dtype=torch.uint8)
        return o, row_stats, block_mask

    def backward_with_derivative(
        self, do: Tensor, dlse: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, ...]:
        check_no_tangents((do, dlse, *arguments))
        saved = Saved(*arguments[: len(Saved._fields)])
        options, wanted = schema.unpack_backward(arguments[len(saved) :])
        problem = unpack(saved.q, saved.k, saved.v, options)
        gradients = attach_backward(self, problem, saved, do, dlse, tuple(wanted))
        return tuple(do.new_empty(0) if x is None else x for x in gradients)


def register_attention(namespace: str) -> None:
    """Tells torch all that it needs to know of the compiled operators in a namespace."""
    schema.register_fakes(namespace)
    _register(namespace, (Kernels.forward_name, Kernels.backward_name))


def _register(namespace: str, names: tuple[str, str]) -> None:
    """Makes a forward and a backward operator differentiable, and defines their vmap."""
    if MISSING_FOR_OPERATORS:
        return
    forward, backward = names
    operators = _Registered(namespace, names)
    register_derivative(namespace, forward, operators.with_derivative)
    register_derivative(namespace, backward, operators.backward_with_derivative)
    qkv, options = [ENTRIES] * 3, [batch_of(field) for field in FIELDS]
    outputs = [ENTRIES, _ROW_STATS, _BLOCK_MASK]
    register_vmap(namespace, forward, qkv + options, outputs, _is_one_by_one)
    of_options = [_NUMBER] * len(DIFFERENTIABLE)
    register_vmap(
        namespace,
        backward,
        [ENTRIES, ENTRIES, *qkv, *outputs, *options, *of_options, _NUMBER],
        [*qkv, *of_options],
        _is_backward_one_by_one,
    )


def _is_one_by_one(arguments: Sequence[Any]) -> bool:
    """True if examples cannot share a batch: dropout would differ, or q has no batch entries."""
    options = dict(zip(_OPTIONS, arguments[3:], strict=True))
    is_packed = options["cu_seqlens_q"] is not None or options["block_table"] is not None
    return is_packed or options["dropout_p"] != 0.0


def _is_backward_one_by_one(arguments: Sequence[Any]) -> bool:
    """True also if an option needs a gradient, which the kernels sum over the batch."""
    options, wanted = schema.unpack_backward(arguments[2 + len(Saved._fields) :])
    return bool(wanted) or _is_one_by_one([*arguments[2:5], *options])


def _check_has_backward(problem: Problem) -> None:
    if problem.kind == "cache" or problem.layout.has_packed_pages:
        raise NotImplementedError(
            "attention with a cache or pages has no derivative: call it under torch.no_grad(), "
            "use attention(), or pass backend='reference'"
        )


if extension.unavailable_reason() is None:
    register_attention(NAMESPACE)
_register(NAMESPACE, (TritonBackend.forward_name, TritonBackend.backward_name))
