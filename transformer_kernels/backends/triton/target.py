"""Device detection: the chip whose tiles apply, or the reason why Triton cannot run."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...common.torch_private import constant_in_compiled_code
from .config import CHIPS, Chip, chip_of

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
"""True if Triton interprets kernels, on CPU tensors. Triton reads it when kernels are defined."""
interpreter_rounds_as_a_gpu = False
"""Triton's interpreter does not, but for the patches of tests/support/triton_interpreter.py."""
INSTALLED = importlib.util.find_spec("triton") is not None


@constant_in_compiled_code
def reason_against(device: torch.device) -> str | None:
    """Returns the reason why Triton cannot run on the device, or None if it can."""
    if not INSTALLED:
        return "the package triton is not installed: pip install triton"
    if INTERPRETED and not interpreter_rounds_as_a_gpu:
        return "TRITON_INTERPRET is set, and Triton's interpreter does not round as a GPU does"
    if INTERPRETED:
        reason = f"the tensors are on {device}; Triton's interpreter (TRITON_INTERPRET=1) needs CPU"
        return None if device.type == "cpu" else f"{reason} tensors"
    if device.type != "cuda":
        return f"the tensors are on {device}; the triton backend needs GPU tensors"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"the GPU is sm_{major}{minor}; the triton backend needs sm_80 or later"
    return None


_override: Chip | None = None


@contextmanager
def override_chip(chip: Chip) -> Iterator[None]:
    """Context manager that reports every device as this chip, to compile for an absent GPU."""
    global _override
    before, _override = _override, chip
    try:
        yield
    finally:
        _override = before


def chip(device: torch.device) -> Chip:
    """Returns the chip whose table of tiles the device uses."""
    found: Chip = _override or _chip(device)
    return found


@constant_in_compiled_code
@functools.cache
def _chip(device: torch.device) -> Chip:
    if device.type != "cuda":
        return CHIPS["sm90"]
    if torch.version.hip is not None:
        return CHIPS["gfx9"]
    return chip_of(torch.cuda.get_device_capability(device))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; for other devices that of an H200."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
