"""NaN in uninitialized memory, to detect elements that a kernel fails to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

from tests.support import emulator
from transformer_kernels.backends.native import extension


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Context manager in which uninitialized memory holds NaN (integers: their largest value).

    Allocations from Python use torch's `fill_uninitialized_memory`, which requires deterministic
    algorithms. Outputs and workspaces of compiled kernels have a switch of their own
    (csrc/common/workspace.h).
    """
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
