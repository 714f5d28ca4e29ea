"""Selection of the instruction set of the CPU kernels in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_kernels import _C


def _runs(name: str) -> bool:
    before = _C.isa()
    try:
        _C.force_isa(name)
    except ValueError:
        return False
    _C.force_isa(before)
    return True


ISAS = tuple(name for name in _C.built_isas() if _runs(name))
"""Instruction sets that are built and that this CPU has, or that are emulated."""


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Context manager that selects an instruction set. Raises ValueError if the CPU lacks it."""
    before = _C.isa()
    _C.force_isa(name)
    try:
        yield
    finally:
        _C.force_isa(before)
