"""The arguments that the functions of flash_attn share, as those of our operators."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TypedDict, cast

import torch
from torch import Tensor

from ...common.argument_checks import FLOATS, check_int, check_number, check_tensor, shown
from ...masks.mask import Mask
from ...scores.alibi import Alibi, alibi


class Options(TypedDict):
    """Arguments of our operators."""

    mask: Mask | None
    bias: Alibi | None
    scale: float | None
    softcap: float | None


def score_options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int] | Tensor,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Options:
    """Returns the arguments of our operators that these are.

    Args:
        softmax_scale: factor of q k^T; None is 1/sqrt(headdim).
        causal: sets the right side of the window to 0.
        window_size: (left, right), visible keys before and after the diagonal, which ends at the
            last query and the last key; negative is unbounded.
        softcap: bound of the scores; 0 or less is none.
        alibi_slopes: (heads,) or (batch, heads), float32.
    """
    cap = check_number("softcap", softcap)
    return {
        "mask": _mask(causal, window_size),
        "bias": None if alibi_slopes is None else alibi(alibi_slopes, align="bottom_right"),
        "scale": softmax_scale,
        "softcap": cap if cap > 0.0 else None,
    }


def is_local(window_size: Sequence[int] | Tensor) -> bool:
    """True if the window is bounded on a side."""
    return any(side >= 0 for side in _sides(window_size))


def _mask(causal: bool, window_size: Sequence[int] | Tensor) -> Mask | None:
    """Returns the windows, bottom-right aligned; None if everything is visible."""
    left, right = (None if side < 0 else side for side in _sides(window_size))
    right = 0 if causal else right
    if left is right is None:
        return None
    return Mask.window(left, right, align="bottom_right")


def _sides(window_size: Sequence[int] | Tensor) -> tuple[int, int]:
    """Returns (left, right); raises TypeError unless they are two ints."""
    wanted = "a pair of ints"
    pair = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"window_size must be {wanted}, got {shown(window_size)}")
    left, right = pair
    for side in (left, right):
        check_int("window_size", side, wanted=wanted)
    return left, right


def check_backward(deterministic: bool, *inputs: Tensor) -> None:
    """Raises ValueError for a gradient on a GPU that would not be deterministic."""
    if deterministic and torch.is_grad_enabled():
        check_deterministic(any(x.is_cuda and x.requires_grad for x in inputs))


def check_deterministic(on_gpu: bool) -> None:
    """Raises ValueError if a backward pass on a GPU would not be deterministic."""
    if on_gpu and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic=True on a GPU needs torch.use_deterministic_algorithms(True), which "
            "selects deterministic kernels in the backward pass"
        )


def warn_of_probabilities(name: str) -> None:
    """Warns once in a process that the argument `name` gives no probabilities; not in compiled
    code."""
    if not torch.compiler.is_compiling():
        _warn_once(name)


@cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"{name}=True returns None in place of the attention probabilities, which the kernels "
        "never hold",
        stacklevel=4,
    )


def as_int(x: int | Tensor) -> int:
    """Returns the value of an integer scalar tensor, and other arguments as they are."""
    is_scalar = isinstance(x, Tensor) and x.dim() == 0 and not x.is_floating_point()
    return int(x) if is_scalar else cast(int, x)  # the operators raise for other types


def check_dimensions(name: str, x: Tensor, dimensions: str) -> None:
    """Raises unless x is a floating-point tensor with these dimensions; a number is a fixed size.

    Examples:
        >>> check_dimensions("kv", kv, "batch, seqlen, 2, heads, headdim")
    """
    check_tensor(name, x, FLOATS, wanted="a floating-point tensor")
    wanted = dimensions.split(", ")
    fits = x.dim() == len(wanted) and all(
        not one.isdecimal() or int(one) == size for one, size in zip(wanted, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} must be ({dimensions}), got shape {tuple(x.shape)}")


def check_packed(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None = None) -> None:
    """Raises unless q, k and v have the dimensions of packed sequences, or k and v of pages."""
    check_dimensions("q", q, "total_q, heads, headdim")
    rows = "total_k" if block_table is None else "blocks, page_size"
    for name, x in (("k", k), ("v", v)):
        check_dimensions(name, x, f"{rows}, heads_k, headdim")
