"""Instruction sets of the CPU kernels, forced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from transformer_kernels import _C


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Inside it, kernels for this instruction set run; a CPU that lacks it skips the test."""
    before = _C.isa()
    try:
        _C.force_isa(name)
    except ValueError as reason:
        pytest.skip(str(reason))
    try:
        yield
    finally:
        _C.force_isa(before)
