"""Autocast, as torch's own attention has it: q, k and v go to the autocast dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast every float tensor but float64 goes to its dtype."""
    if not (isinstance(q, Tensor) and _is_on(q.device.type)):
        return q, k, v
    target = torch.get_autocast_dtype(q.device.type)
    return _cast(q, target), _cast(k, target), _cast(v, target)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """The kernels choose their own precision: autocast must not lower what they compute with."""
    if _is_on(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _is_on(device_type: str) -> bool:
    # Asking about a device that has no autocast, such as meta, is an error.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _cast(x: Tensor, target: torch.dtype) -> Tensor:
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(target)
    return x
