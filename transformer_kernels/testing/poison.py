"""Fresh memory that is NaN: what a kernel forgets to write, or reads too early, shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

from transformer_kernels import ops
from transformer_kernels.testing import emulator


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside it, whatever torch allocates without a value holds NaN (integers: their largest).

    For what Python allocates this is torch's own switch, and it switches deterministic algorithms
    on with it. The compiled kernels' outputs and scratch memory have theirs (csrc/memory.h).
    """
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    ops.want_poison(True)
    emulator.want_poison(True)
    try:
        yield
    finally:
        ops.want_poison(False)
        emulator.want_poison(False)
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
