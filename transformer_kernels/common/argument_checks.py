"""Checks of single arguments. Errors name the argument, its value and what is expected."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence

import torch
from torch import Tensor

from . import torch_private

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
)  # fmt: skip
"""Integer dtypes whose values int64 holds."""
INDICES = (torch.int32, torch.int64)

LARGEST_INT = (1 << 63) - 1


def shown(value: object) -> str:
    """Returns a short description of any value, for error messages."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor {tuple(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_int(
    name: str,
    value: int,
    low: int = -LARGEST_INT - 1,
    high: int = LARGEST_INT,
    wanted: str = "an int",
) -> None:
    """Raises unless value is an int, not a bool, from low to high. `wanted` describes the type."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}")
    if not low <= value <= high:
        bound = f"at least {low}" if value < low else f"at most {high}"
        raise ValueError(f"{name} must be {bound}, got {shown(value)}")


def check_number(name: str, value: float) -> float:
    """Returns value as a float; raises unless it is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit in a float, got {shown(value)}") from None
    if not -math.inf < number < math.inf:  # math.isfinite rejects symbolic numbers
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def check_bool(name: str, value: bool) -> None:
    """Raises TypeError unless value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_tensor(
    name: str,
    x: Tensor,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    wanted: str | None = None,
) -> None:
    """Raises unless x is a strided tensor of one of these dtypes, on q's device if it is given.

    `wanted` describes the dtypes.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be {wanted or 'a tensor'}, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{name} must be a strided tensor, got a nested tensor")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {x.layout}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be {wanted or _listed(dtypes)}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, q is on {device}")


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    *first, last = (str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
    return f"{', '.join(first)} or {last}" if first else last


def as_device(device: torch.device | str | int) -> torch.device:
    """Returns the device; raises ValueError for one that torch does not know or cannot use."""
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device must be a torch device, got {shown(device)}")
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, ValueError, AssertionError) as error:
        message = str(error).partition("\n")[0]
        raise ValueError(f"device must be a torch device, got {shown(device)}: {message}") from None


def values_are_readable(x: Tensor) -> bool:
    """True if reading the values of x neither synchronises, breaks a graph nor fails.

    Inside `vmap`, a batch of tensors has no values of its own.
    """
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch_private.is_fake(x)
        and not torch_private.is_batched(x)
    )


def savable(x: Tensor) -> Tensor:
    """Returns x, or in grad mode a copy of an inference tensor, which autograd cannot save."""
    return x.clone() if is_inference(x) and torch.is_grad_enabled() else x


def is_inference(x: Tensor) -> bool:
    """True if x was made in inference mode. False in compiled code, where torch cannot tell."""
    return not torch.compiler.is_compiling() and x.is_inference()
