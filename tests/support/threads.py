"""Number of torch's threads in tests. Small models run faster on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Context manager in which torch runs on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Context manager in which torch runs on one thread."""
    return threads(1)
