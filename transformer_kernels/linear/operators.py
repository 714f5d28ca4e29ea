"""Schemas of the compiled operators of linear attention, and their fake implementations.

csrc/bindings/linear_operators.cpp declares the same schemas. The fake implementations are what
torch.compile and torch.export run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends.schema import empty_like_layout
from transformer_kernels.linear.reference import state_dtype
from transformer_kernels.linear.types import Inputs

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? S, Tensor? z, Tensor? cu_seqlens, "
    "Tensor? key_start, Tensor? key_end"
)
_OPTIONS = "int feature_map, bool causal, bool normalize, float eps"
FORWARD = f"({_INPUTS}, {_OPTIONS}) -> (Tensor o, Tensor normalizer, Tensor S_end, Tensor z_end)"
BACKWARD = (
    "(Tensor d_o, Tensor? dS_end, Tensor? dz_end, Tensor o, Tensor normalizer, "
    f"{_INPUTS}, {_OPTIONS}, bool log_decay_needs_grad) -> (Tensor dq, Tensor dk, Tensor dv, "
    "Tensor dlog_decay, Tensor dS, Tensor dz)"
)
"""The gradient of an option that is not given, or not wanted, has no elements."""
STEPS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor(a!) S, Tensor(b!) z, "
    "int feature_map, bool normalize, float eps) -> Tensor o"
)


def forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x, normalize = Inputs._make(arguments[:9]), arguments[11]
    q, k, v = x[:3]
    dtype = state_dtype(q.dtype)
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


def register_fakes(namespace: str, names: Sequence[str] = ("forward", "backward", "steps")) -> None:
    """Registers the fake implementations of the operators linear_<name> in a namespace."""
    fakes: dict[str, Callable[..., Any]] = {
        "forward": forward_fake,
        "backward": backward_fake,
        "steps": steps_fake,
    }
    for name in names:
        torch.library.register_fake(f"{namespace}::linear_{name}", fakes[name])
