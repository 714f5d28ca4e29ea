"""Where kernels run, or why they cannot."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from transformer_kernels.backends.triton import interpreter
from transformer_kernels.backends.triton.config import CHIPS, Chip, chip_of

INSTALLED = importlib.util.find_spec("triton") is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def reason_against(device: torch.device) -> str | None:
    """Why Triton cannot run on the device; None when it can."""
    if not INSTALLED:
        return "the package triton is not installed: pip install triton"
    if interpreter.is_on():
        where = f"tensors are on {device}, and Triton's interpreter is on, which takes CPU tensors"
        return None if device.type == "cpu" else where
    if device.type != "cuda":
        return f"tensors are on {device}, Triton's kernels run on a GPU"
    if not torch.cuda.is_available():
        return "there is no GPU here"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"the GPU is sm_{major}{minor}; tiles are for sm_80 and later"
    return None


_pretended: Chip | None = None


@contextmanager
def pretend(chip: Chip) -> Iterator[None]:
    """Inside it every device is this chip: to compile for one that is not here."""
    global _pretended
    before, _pretended = _pretended, chip
    try:
        yield
    finally:
        _pretended = before


def chip(device: torch.device) -> Chip:
    """Whose table of tiles the device uses."""
    found: Chip = _pretended or _chip(device)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@functools.cache
def _chip(device: torch.device) -> Chip:
    if device.type != "cuda":
        return CHIPS["sm90"]
    if torch.version.hip is not None:
        return CHIPS["gfx9"]
    return chip_of(torch.cuda.get_device_capability(device))
