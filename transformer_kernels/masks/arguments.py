"""Checks of the arguments of a mask's constructors."""

from __future__ import annotations

from torch import Tensor

from ..common.argument_checks import INTEGERS, check_int, check_tensor, shown
from ..common.storage import check_storage
from .constraints import UNBOUNDED


def integers(name: str, value: Tensor, *shapes: str) -> Tensor:
    """Returns a tensor of integers with as many dimensions as one of `shapes`, texts."""
    check_tensor(name, value, INTEGERS, wanted="a tensor of integers")
    if value.dim() not in [len(shape.strip("(,)").split(",")) for shape in shapes]:
        raise ValueError(f"{name} must be {' or '.join(shapes)}, got shape {tuple(value.shape)}")
    return value.resolve_neg()


def vector(name: str, value: Tensor) -> Tensor:
    return integers(name, value, "(batch,)")


def ids_of(name: str, value: Tensor) -> Tensor:
    return integers(name, value, "(batch, length)")


def positions_of(name: str, value: Tensor) -> Tensor:
    return integers(name, value, "(batch, length)", "(batch, heads, length)")


def size_of(name: str, value: int, least: int = 0) -> int:
    check_int(name, value, least, (1 << 31) - 1)
    return value


def extent_of(name: str, value: int | None) -> int | None:
    """Returns an extent of a window, at most 2^62: sums with indices then fit in 64 bits."""
    if value is None:
        return None
    if type(value) is int and -UNBOUNDED <= value <= UNBOUNDED:
        return value
    check_int(name, value, wanted="an int or None")
    return min(max(value, -UNBOUNDED), UNBOUNDED)


def range_of(name: str, part: slice, length: int) -> range:
    if not isinstance(part, slice):
        raise TypeError(f"{name} must be a slice, got {shown(part)}")
    if part.step not in (None, 1):
        raise ValueError(f"{name} must have step 1, got {part.step}")
    start, end, _ = part.indices(length)
    return range(start, max(start, end))


def with_dimensions(name: str, x: Tensor, dims: int) -> Tensor:
    """Views x with leading dimensions of size 1, `dims` dimensions in all."""
    if x.dim() == dims:
        return x
    try:
        return x[(None,) * (dims - x.dim())]
    except RuntimeError:
        check_storage(((name, x),))
        raise
