"""Argument checks shared by attention, varlen and decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.argument_checks import FLOATS, INDICES, check_tensor, shown, values_are_readable
from ..common.storage import check_storage
from ..masks.constraints import KeyRange, Window
from ..masks.mask import Mask

DTYPES = FLOATS


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dimensions: tuple[str, ...] = ("batch", "heads", "length", "width"),
    *,
    key_dimensions: tuple[str, ...] | None = None,
    key_dtype: torch.dtype | None = None,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> None:
    """Raises TypeError or ValueError unless q, k and v have matching dimensions, dtype and device.

    The heads are dimension 1, and the width is the last one. `key_dimensions` names the dimensions
    of k and v if they differ from q's; `key_dtype` is theirs, checked already, if it differs.
    `names` are the argument names for error messages.
    """
    key_dimensions = dimensions if key_dimensions is None else key_dimensions
    named = ((names[0], q), (names[1], k), (names[2], v))
    check_alike(named, (dimensions, key_dimensions, key_dimensions), key_dtype)
    rule = broken_shape_rule(q.shape, k.shape, v.shape, key_dimensions, names)
    if rule is not None:
        shapes = (f"{name} {tuple(x.shape)}" for name, x in named)
        raise ValueError(f"{rule}, got {', '.join(shapes)}")


def check_alike(
    named: Sequence[tuple[str, Tensor]],
    dimensions: Sequence[tuple[str, ...]],
    key_dtype: torch.dtype | None = None,
) -> None:
    """Raises unless tensors, given with their names, have these dimensions, the dtype and device of
    the first one, and valid storage. `key_dtype` is that of the others, checked already."""
    first, x = named[0]
    names = [name for name, _ in named]
    for (name, other), its_dimensions in zip(named, dimensions, strict=True):
        if key_dtype is None or other is x:
            check_tensor(name, other, DTYPES)
        if other.dim() != len(its_dimensions):
            raise ValueError(
                f"{name} must be ({', '.join(its_dimensions)}), got shape {tuple(other.shape)}"
            )
        if key_dtype is None and other.dtype != x.dtype:
            raise TypeError(
                f"{_listed(names)} must share a dtype, got {name} {other.dtype}, {first} {x.dtype}"
            )
        if other.device != x.device:
            raise ValueError(
                f"{_listed(names)} must be on one device, got {name} on {other.device}, "
                f"{first} on {x.device}"
            )
    check_storage(named)


def broken_shape_rule(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    key_dimensions: tuple[str, ...],
    names: tuple[str, str, str],
) -> str | None:
    """Returns the rule that the shapes break, for an error message; None if they fit."""
    if key_dimensions[0] == "batch" and not q[0] == k[0] == v[0]:
        return f"{_listed(names)} must share the batch size"
    if k[:-1] != v[:-1]:
        others = (name for name in key_dimensions if name not in ("batch", "heads", "width"))
        return f"{names[1]} and {names[2]} must share {_listed(('heads', *others))}"
    if q[-1] != k[-1]:
        return f"{names[0]} and {names[1]} must share the width D"
    if k[1] == 0 or q[1] % k[1] != 0 or q[1] == 0:
        return f"{names[0]}'s heads must be a positive multiple of {names[1]}'s"
    if q[-1] == 0 or v[-1] == 0:
        return "the widths D and D_v must be at least 1"
    return None


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def check_mask_tensors(mask: Mask, device: torch.device) -> None:
    """Raises ValueError unless the mask's tensors have memory and are on q's device."""
    tensors = mask.tensors()
    if not tensors:
        return
    for name, tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"the mask's {name} is on {tensor.device}, q is on {device}")
    check_storage((f"the mask's {name}", tensor) for name, tensor in tensors)


def private_copy(x: Tensor) -> Tensor:
    """Returns a copy of lengths, offsets or pages on the CPU, where their values are checked:
    another thread may write x between the check and the kernels. Else returns x."""
    return x.clone() if values_are_readable(x) else x


def check_integers(
    name: str, x: Tensor, dimensions: tuple[str, ...], B: int, q: Tensor, q_name: str = "q"
) -> None:
    """Raises unless x has int32 or int64 elements on q's device and the shape (B, ...).

    `dimensions` names its dimensions, B first. Values are not checked.
    """
    check_tensor(name, x, INDICES)
    if x.dim() != len(dimensions) or x.shape[0] != B:
        wanted = f"({dimensions[0]},)" if len(dimensions) == 1 else f"({', '.join(dimensions)})"
        raise ValueError(f"{name} must be {wanted} with B = {B}, got shape {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, {q_name} is on {q.device}")
    check_storage(((name, x),))


def check_windows(mask: Mask | None, where: str, *, key_ranges: bool = False) -> None:
    """Raises unless the mask consists of windows, and of key ranges if those are allowed.

    `where` completes the error message.
    """
    if mask is None:
        return
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask or None, got {type(mask).__name__}")
    for constraint in mask.constraints:
        if isinstance(constraint, Window) or (key_ranges and isinstance(constraint, KeyRange)):
            continue
        listed = "Mask.window, Mask.causal and Mask.key_range"
        raise ValueError(
            f"mask may combine only {listed if key_ranges else 'Mask.window and Mask.causal'} "
            f"{where}, got a {type(constraint).__name__} constraint"
        )


def check_alibi_or_none(bias: object, where: str) -> None:
    """Raises ValueError if the bias is a dense tensor. `where` completes the error message."""
    if isinstance(bias, Tensor):
        raise ValueError(f"bias must be alibi(slopes) or None {where}, got {shown(bias)}")


def scaled_queries(q: Tensor, scale: float | Tensor | None) -> tuple[Tensor, float | None]:
    """Returns (scale q, 1) if the scale is a tensor, else (q, scale).

    The product has one rounding to q's dtype. Raises for a scale that is not one element in q's
    dtype or float32, on q's device.
    """
    if not isinstance(scale, Tensor):
        return q, scale
    check_learned_scale(q, scale)
    # Not a scalar tensor, which torch would round to q's dtype before the product.
    return (q * scale.reshape(1).to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype), 1.0


def check_learned_scale(q: Tensor, scale: Tensor) -> None:
    check_storage((("q", q), ("scale", scale)))
    check_tensor("q", q, DTYPES)
    check_tensor("scale", scale, (q.dtype, torch.float32), q.device)
    if scale.numel() != 1:
        raise ValueError(f"scale must have one element, got shape {tuple(scale.shape)}")
