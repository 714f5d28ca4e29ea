"""Validation of `attention_decode` calls, and of the caches that they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor

from ..common.argument_checks import values_are_readable
from ..masks.mask import Mask
from ..masks.resolved import ResolvedMask, bounded_aligns, resolve_windows
from ..scores.alibi import Alibi
from ..scores.options import ScoreArguments, check_scores
from ..scores.relative import Relative
from ..scores.sinks import check_sinks
from .checks import (
    check_alibi_or_none,
    check_integers,
    check_mask_tensors,
    check_tensors,
    check_windows,
    private_copy,
)
from .int8_cache import Scales, are_int8, check_scales
from .layout import Layout
from .pages import PAGE_DIMENSIONS, capacity, check_block_table, check_pages_in_use
from .types import Problem, shape_of

_CAUSAL = resolve_windows(Mask.causal(align="bottom_right"), "bottom_right")
_NAMES = ("q", "k_cache", "v_cache")


def cache_problem(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    mask: Mask | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **scores: Unpack[ScoreArguments],
) -> Problem:
    """Validates a call of `attention_decode`; errors name the argument, its value and the rule."""
    cache_seqlens, block_table = check_cache(
        q, k_cache, v_cache, cache_seqlens, block_table, _NAMES, (k_scale, v_scale)
    )
    check_windows(mask, "for decoding", key_ranges=True)
    bias = scores.get("bias")
    check_alibi_or_none(bias, "for decoding")
    _check_alignment(mask, bias, scores.get("relative"))
    check_sinks(sinks, q)
    if mask is not None:
        check_mask_tensors(mask, q.device)
        B, H, M, _ = q.shape
        for constraint in mask.constraints:
            constraint.check(B, H, M, capacity(k_cache, block_table))
    layout = Layout(
        cache_seqlens=cache_seqlens.to(torch.int32).contiguous(),
        block_table=None if block_table is None else block_table.to(torch.int32),
        k_scale=k_scale,
        v_scale=v_scale,
    )
    shape = shape_of(q, k_cache, v_cache, layout)
    options = check_scores(q, shape.M, shape.N, bottom_right=True, **scores)
    return Problem(shape, resolve_cache_mask(mask), options, layout)


def resolve_cache_mask(mask: Mask | None) -> ResolvedMask:
    """Resolves bottom-right aligned windows and key ranges. No mask means causal."""
    return _CAUSAL if mask is None else resolve_windows(mask, "bottom_right")


def check_no_gradient(
    tensors: Mapping[str, object],
    operator: str = "attention_decode",
    instead: str = "use attention(), or pass backend='reference'",
) -> None:
    """Raises ValueError in grad mode if a tensor requires grad: decoding has no backward pass."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        x = x.slopes if isinstance(x, Alibi) else x
        parts = x.tensors() if isinstance(x, Relative) else (x,)
        if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
            raise ValueError(
                f"{name} must not require grad, because {operator} has no backward pass: "
                f"call it under torch.no_grad(), {instead}"
            )


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    names: tuple[str, str, str],
    scales: Scales,
) -> tuple[Tensor, Tensor | None]:
    """Raises unless the cache, paged or not, fits q (or the keys to be appended).

    Returns cache_seqlens and block_table; on the CPU, private copies, whose values are checked.
    """
    is_int8 = are_int8(k_cache, v_cache, scales, names[1:])
    key_dimensions = None if block_table is None else PAGE_DIMENSIONS
    key_dtype = torch.int8 if is_int8 else None
    check_tensors(
        q, k_cache, v_cache, key_dimensions=key_dimensions, key_dtype=key_dtype, names=names
    )
    if block_table is not None:
        check_block_table(block_table, q.shape[0], q, k_cache, names[:2])
    if is_int8:
        check_scales(k_cache, scales, block_table is not None)
    check_integers("cache_seqlens", cache_seqlens, ("B",), q.shape[0], q, names[0])
    if capacity(k_cache, block_table) >= 1 << 31:
        raise ValueError(
            "the cache capacity must be less than 2^31 positions per sequence, got "
            f"{names[1]} {tuple(k_cache.shape)}"
        )
    cache_seqlens = private_copy(cache_seqlens)
    block_table = None if block_table is None else private_copy(block_table)
    if values_are_readable(cache_seqlens) and not (
        block_table is not None and not values_are_readable(block_table)
    ):
        _check_values(k_cache, cache_seqlens, block_table, names[1])
    return cache_seqlens, block_table


def _check_values(
    k_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, name: str
) -> None:
    limit = capacity(k_cache, block_table)
    for b, length in enumerate(cache_seqlens.tolist()):
        if not 0 <= length <= limit:
            raise ValueError(
                f"cache_seqlens must be from 0 to {limit}, the capacity of {name}, "
                f"got {length} at {b}"
            )
    if block_table is not None:
        check_pages_in_use(k_cache, cache_seqlens, block_table, name)


def _check_alignment(mask: Mask | None, bias: object, relative: object) -> None:
    """Raises unless windows and biases are bottom-right aligned: caches grow at the end."""
    if "top_left" in bounded_aligns(mask):
        raise ValueError("mask must have align='bottom_right' for decoding, got align='top_left'")
    if isinstance(bias, Alibi) and bias.align != "bottom_right":
        raise ValueError(
            "bias must be alibi(slopes, align='bottom_right') for decoding, "
            f"got align={bias.align!r}"
        )
    if isinstance(relative, Relative) and relative.align != "bottom_right":
        raise ValueError(
            "relative must have align='bottom_right' for decoding, got align='top_left'"
        )
