"""Operator schemas of linear attention, and the fake implementations that torch.compile and
torch.export run.

The compiled operators and the Triton operators share them; csrc/bindings/linear_call.cpp declares
the same schemas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.schema import empty_like_layout
from ..problem.types import accumulate_dtype
from .types import Inputs

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? S, Tensor? z, Tensor? cu_seqlens, "
    "Tensor? key_start, Tensor? key_end, int feature_map, bool causal, bool normalize, float eps"
)
FORWARD = f"({_INPUTS}) -> (Tensor o, Tensor normalizer, Tensor S_end, Tensor z_end)"
BACKWARD = (
    "(Tensor d_o, Tensor? dS_end, Tensor? dz_end, Tensor o, Tensor normalizer, "
    f"{_INPUTS}, bool log_decay_needs_grad) -> (Tensor dq, Tensor dk, Tensor dv, "
    "Tensor dlog_decay, Tensor dS, Tensor dz)"
)
STEPS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor(a!) S, Tensor(b!) z, "
    "int feature_map, bool normalize, float eps) -> Tensor o"
)


def forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x, normalize = Inputs._make(arguments[:9]), arguments[11]
    q, k, v = x[:3]
    dtype = accumulate_dtype(q.dtype)
    B = q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    H_kv, D, D_v = k.shape[1], k.shape[3], v.shape[3]
    return (
        empty_like_layout(q, D_v),
        q.new_empty(q.shape[:3] if normalize else (0,), dtype=dtype),
        q.new_empty((B, H_kv, D, D_v), dtype=dtype),
        q.new_empty((B, H_kv, D), dtype=dtype),
    )


def backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x, log_decay_needs_grad = Inputs._make(arguments[5:14]), arguments[18]
    gradients = [empty_like_layout(t, t.shape[3]) for t in x[:3]]
    for t in (x.log_decay if log_decay_needs_grad else None, x.S, x.z):
        gradients.append(x.q.new_empty(0) if t is None else t.new_empty(t.shape))
    return tuple(gradients)


def steps_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return empty_like_layout(q, v.shape[3])


def register_fakes(namespace: str) -> None:
    """Registers the fake implementations of the compiled operators in a namespace."""
    torch.library.register_fake(f"{namespace}::linear_forward", forward_fake)
    torch.library.register_fake(f"{namespace}::linear_backward", backward_fake)
    torch.library.register_fake(f"{namespace}::linear_steps", steps_fake)
