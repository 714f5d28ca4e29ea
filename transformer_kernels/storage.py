"""Check that the memory of tensor arguments exists."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_kernels.torch_private import functorch_is_active

_PLAIN_TYPES = frozenset((Tensor, Parameter))
_STRIDED = torch.strided
_LARGEST_OFFSET = 1 << 44
"""Bytes; no offset in a storage is larger. 64-bit systems map memory mostly at addresses above."""


def check_storage(tensors: Iterable[tuple[str, object]]) -> None:
    """Raises ValueError if the storage of a tensor, given with its name, is freed.

    `x.untyped_storage().resize_(0)` frees it, as sharded training does; x keeps its shape.
    Subclasses and traced tensors, which may have no storage of their own, are accepted.
    """
    if torch.compiler.is_compiling() or functorch_is_active():
        return
    for name, x in tensors:
        if type(x) not in _PLAIN_TYPES or not isinstance(x, Tensor) or x.layout is not _STRIDED:
            continue
        if x.data_ptr() > _LARGEST_OFFSET or x.is_nested or x.numel() == 0:
            continue
        if x.untyped_storage().nbytes() == 0:
            raise ValueError(
                f"{name} has the shape {tuple(x.shape)}, but its storage is freed; "
                "expected a tensor with memory"
            )
