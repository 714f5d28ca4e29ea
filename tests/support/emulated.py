"""Installs the emulator when it is imported, so that backend="cuda" accepts CPU tensors."""

from __future__ import annotations

import os

from tests.support import emulator

SWITCH = "TRANSFORMER_KERNELS_EMULATOR"
"""Environment variable. 0 disables the emulator, so that a GPU runs the kernels."""

NOT_EMULATED = f"{SWITCH} is 0" if os.environ.get(SWITCH) == "0" else emulator.unavailable_reason()
"""The reason why kernels are not emulated, or None."""

if NOT_EMULATED is None:
    emulator.install()
