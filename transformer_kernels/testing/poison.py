"""Fresh memory that is NaN: what a kernel forgets to write, or reads too early, shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside it, whatever torch allocates without a value holds NaN (integers: their largest).

    That covers the outputs and the workspaces of compiled operators too, because these come from
    `aten::empty`. It is torch's own switch, and it switches deterministic algorithms on with it.
    """
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
