"""Autocast as in torch's attention: q, k, v and a bias are cast to the autocast dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ..common.storage import check_storage

_Bias = TypeVar("_Bias")


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts floating-point tensors other than float64 to the autocast dtype, if autocast is on."""
    if not (isinstance(q, Tensor) and _is_on(q.device.type)):
        return q, k, v
    target = torch.get_autocast_dtype(q.device.type)
    if type(q) is type(k) is type(v) is Tensor and q.dtype is k.dtype is v.dtype is target:
        return q, k, v
    check_storage((("q", q), ("k", k), ("v", v)))
    return _cast(q, target), _cast(k, target), _cast(v, target)


def cast_bias(bias: _Bias, q: Tensor) -> _Bias | Tensor:
    """Casts a half-precision bias to q's dtype, if autocast is on. Float32 stays: it loses less."""
    if not (isinstance(bias, Tensor) and isinstance(q, Tensor) and _is_on(q.device.type)):
        return bias
    return bias.to(q.dtype) if bias.dtype in (torch.float16, torch.bfloat16) else bias


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Disables autocast inside a call: it must not lower the precision that kernels choose."""
    if _is_on(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _is_on(device_type: str) -> bool:
    # torch.is_autocast_enabled raises an error for devices without autocast, such as meta.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _cast(x: Tensor, target: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return x  # the checks of the call refuse it
    return x.to(target) if x.is_floating_point() and x.dtype != torch.float64 else x
