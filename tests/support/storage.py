"""Tensors whose storage is freed, as sharded training does with parameters that it gathers."""

from __future__ import annotations

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
