"""The operators of linear attention: tables of their arguments, schemas, and the fake
implementations that torch.compile and torch.export run.

`Inputs` and `Options` declare the rows (see `problem.fields`); csrc/common/linear_fields.h is the
same table for C++. The schemas, packing and unpacking derive from it. The compiled operators and
the Triton operators share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.schema import empty_like_layout
from ..problem.fields import Field, schema_of, split, table
from ..problem.types import accumulate_dtype
from .types import BackwardCall, Cotangents, Gradients, Inputs, Options, Saved

FIELDS = table(Inputs, Options)
BACKWARD_FIELDS = (
    *table(Cotangents, Saved),
    *FIELDS,
    Field("log_decay_needs_grad", "bool", "", "backward", default=False),
)
_OVERWRITTEN = {"S": "Tensor(a!)", "z": "Tensor(b!)"}
STEP_FIELDS = [
    field._replace(kind=_OVERWRITTEN.get(field.name, field.kind))
    for field in FIELDS
    if "steps" in field.layouts
]
_STEP_INPUTS, _STEP_OPTIONS = (
    sum("steps" in field.layouts for field in table(group)) for group in (Inputs, Options)
)
"""Numbers of the fields of steps, which come first in both groups."""

FORWARD = f"({schema_of(FIELDS)}) -> (Tensor o, Tensor normalizer, Tensor S_end, Tensor z_end)"
BACKWARD = (
    f"({schema_of(BACKWARD_FIELDS)}) -> (Tensor dq, Tensor dk, Tensor dv, "
    "Tensor dlog_decay, Tensor dS, Tensor dz)"
)
STEPS = f"({schema_of(STEP_FIELDS)}) -> Tensor o"


def pack(x: Inputs, options: Options) -> tuple[Any, ...]:
    """Returns the arguments of a forward operator."""
    return *x, *options.pack()


def unpack(arguments: Sequence[Any]) -> tuple[Inputs, Options]:
    """Inverse of `pack`."""
    x, options = split(arguments, Inputs, Options)
    return x, Options.unpack(options)


def pack_backward(call: BackwardCall) -> tuple[Any, ...]:
    """Returns the arguments of a backward operator."""
    return (*call.cotangents, *call.saved, *pack(call.x, call.options), call.log_decay_needs_grad)


def unpack_backward(arguments: Sequence[Any]) -> BackwardCall:
    """Inverse of `pack_backward`."""
    *rest, log_decay_needs_grad = arguments
    cotangents, saved, x, options = split(rest, Cotangents, Saved, Inputs, Options)
    return BackwardCall(cotangents, saved, x, Options.unpack(options), log_decay_needs_grad)


def pack_steps(x: Inputs, options: Options) -> tuple[Any, ...]:
    """Returns the arguments of the operator of steps."""
    return *x[:_STEP_INPUTS], *options.pack()[:_STEP_OPTIONS]


def unpack_steps(arguments: Sequence[Any]) -> tuple[Inputs, Options]:
    """Inverse of `pack_steps`; other fields have their defaults."""
    given = {field.name: x for field, x in zip(STEP_FIELDS, arguments, strict=True)}
    return unpack([given.get(field.name, field.default) for field in FIELDS])


def forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x, options = unpack(arguments)
    q, k, v = x.q, x.k, x.v
    dtype = accumulate_dtype(q.dtype)
    B = q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    H_kv, D, D_v = k.shape[1], k.shape[3], v.shape[3]
    return (
        empty_like_layout(q, D_v),
        q.new_empty(q.shape[:3] if options.normalize else (0,), dtype=dtype),
        q.new_empty((B, H_kv, D, D_v), dtype=dtype),
        q.new_empty((B, H_kv, D), dtype=dtype),
    )


def backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = unpack_backward(arguments)
    q, k, v, log_decay, S, z, *_ = call.x
    decay = log_decay if call.log_decay_needs_grad else None
    return Gradients(
        *(empty_like_layout(t, t.shape[3]) for t in (q, k, v)),
        *(None if t is None else t.new_empty(t.shape) for t in (decay, S, z)),
    ).outputs()


def steps_fake(*arguments: Any) -> Tensor:
    x, _ = unpack_steps(arguments)
    return empty_like_layout(x.q, x.v.shape[3])


def register_fakes(namespace: str) -> None:
    """Registers the fake implementations of the compiled operators in a namespace."""
    torch.library.register_fake(f"{namespace}::linear_forward", forward_fake)
    torch.library.register_fake(f"{namespace}::linear_backward", backward_fake)
    torch.library.register_fake(f"{namespace}::linear_steps", steps_fake)
