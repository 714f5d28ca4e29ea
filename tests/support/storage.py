"""Tensors whose storage is freed, as sharded training does, or starts at an odd address."""

from __future__ import annotations

import torch
from torch import Tensor


def freed(x: Tensor) -> Tensor:
    """A tensor of the same shape without memory."""
    base = x.clone()
    base.untyped_storage().resize_(0)
    return base


def freed_view(x: Tensor) -> Tensor:
    """The same, but a view with an offset: its data pointer is not null."""
    base = x.new_zeros(3, *x.shape)
    view = base[2]
    base.untyped_storage().resize_(0)
    return view


def misaligned(x: Tensor) -> Tensor:
    """A copy at an odd address, as `torch.frombuffer` makes it."""
    content = x.detach().contiguous().reshape(-1).view(torch.uint8)
    data = bytearray(b"\0") + bytearray(content.tolist())
    return torch.frombuffer(data, dtype=x.dtype, count=x.numel(), offset=1).reshape(x.shape)
