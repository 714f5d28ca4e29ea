"""Selection of the instruction set of the CPU kernels in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from transformer_kernels import _C


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Context manager that selects an instruction set; skips the test if the CPU lacks it."""
    before = _C.isa()
    try:
        _C.force_isa(name)
    except ValueError as reason:
        pytest.skip(str(reason))
    try:
        yield
    finally:
        _C.force_isa(before)
