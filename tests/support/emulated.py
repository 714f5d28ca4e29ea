"""Lets backend="cuda" take CPU tensors. conftest.py imports it first: others ask for the names of
backends when they are imported."""

from __future__ import annotations

import os

from tests.support import emulator

SWITCH = "TRANSFORMER_KERNELS_EMULATOR"
"""An environment variable; 0 leaves the emulator out, where a GPU is to run the kernels"""

NOT_EMULATED = f"{SWITCH} is 0" if os.environ.get(SWITCH) == "0" else emulator.impossible_reason()
if NOT_EMULATED is None:
    emulator.install()
