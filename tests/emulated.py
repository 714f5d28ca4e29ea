"""Lets backend="cuda" take CPU tensors. conftest.py imports it first: others ask for the names of
backends when they are imported."""

from __future__ import annotations

from transformer_kernels.testing import emulator

NOT_EMULATED = emulator.why_impossible()
if NOT_EMULATED is None:
    emulator.install()
