"""Threads, dtypes and memory of torch in tests: uninitialized, freed and misaligned memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.utils import deterministic


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Context manager in which torch runs on one thread. Small models run faster on it."""
    return threads(1)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Context manager in which uninitialized memory holds NaN (integers: their largest value), so
    that elements that a kernel fails to write are detected.

    Allocations from Python use torch's `fill_uninitialized_memory`, which requires deterministic
    algorithms. Outputs and workspaces of compiled kernels have a switch of their own
    (csrc/common/workspace.h).
    """
    # Not at the top: a conftest.py imports this file before the extension is chosen.
    from tests.support import emulator
    from transformer_kernels.backends.native import extension

    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    extension.want_poison(True)
    emulator.want_poison(True)
    try:
        yield
    finally:
        extension.want_poison(False)
        emulator.want_poison(False)
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def freed(x: Tensor) -> Tensor:
    """A tensor of the same shape without memory, as sharded training leaves it."""
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
