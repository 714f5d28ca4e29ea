"""Check that the memory of tensor arguments exists and is aligned."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from .torch_private import functorch_is_active

PLAIN_TYPES = frozenset((Tensor, Parameter))
"""Tensors of no subclass."""
_STRIDED = torch.strided
_LARGEST_OFFSET = 1 << 44
"""Bytes; no offset in a storage is larger. 64-bit systems map memory mostly at addresses above."""


def are_plainly_stored(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True for strided tensors of no subclass, of one dtype on one device, whose memory exists and
    is aligned. False if more than a look at their addresses is necessary to tell."""
    try:
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError:  # sparse
        return False
    elements = q.element_size() - 1
    return (
        q.dtype is k.dtype is v.dtype
        and q.device == k.device == v.device
        and min(addresses) > _LARGEST_OFFSET
        and (addresses[0] | addresses[1] | addresses[2]) & elements == 0
        and not (q.is_nested or k.is_nested or v.is_nested)
    )


def check_storage(tensors: Iterable[tuple[str, object]]) -> None:
    """Raises ValueError if the storage of a tensor, given with its name, is freed or misaligned.

    `x.untyped_storage().resize_(0)` frees it, as sharded training does; x keeps its shape. An
    element at an address that is not a multiple of its size, as `torch.frombuffer` allows, is
    undefined behaviour for compiled code.
    Subclasses and traced tensors, which may have no storage of their own, are accepted.
    """
    if torch.compiler.is_compiling() or functorch_is_active():
        return
    for name, x in tensors:
        if type(x) not in PLAIN_TYPES or not isinstance(x, Tensor) or x.layout is not _STRIDED:
            continue
        address, element_size = x.data_ptr(), x.element_size()
        if address > _LARGEST_OFFSET and address % element_size == 0:
            continue
        if x.is_nested or x.numel() == 0:
            continue
        if address % element_size != 0:
            raise ValueError(
                f"{name} has elements of {element_size} bytes, but its memory starts at "
                f"{address:#x}; expected a multiple of the element's size: pass a clone"
            )
        if x.untyped_storage().nbytes() == 0:
            raise ValueError(
                f"{name} has the shape {tuple(x.shape)}, but its storage is freed; "
                "expected a tensor with memory"
            )
