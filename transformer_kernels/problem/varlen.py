"""Validation of `attention_varlen` calls."""

from __future__ import annotations

from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor

from ..common import torch_private
from ..common.argument_checks import INDICES, check_int, check_tensor, values_are_readable
from ..common.storage import check_storage
from ..masks.constraints import Align
from ..masks.mask import Mask
from ..masks.resolved import bounded_aligns, resolve_windows
from ..scores.alibi import Alibi
from ..scores.options import ScoreArguments, check_scores
from ..scores.relative import Relative
from ..scores.sinks import check_sinks
from .checks import check_alibi_or_none, check_tensors, check_windows, private_copy
from .layout import Layout
from .pages import PAGE_DIMENSIONS, capacity, check_block_table, checked_table
from .types import Problem, shape_of


def one_entry(x: Tensor) -> Tensor:
    """Views (total, heads, width) as one batch entry, (1, heads, total, width)."""
    return x.transpose(0, 1).unsqueeze(0)


def varlen_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    mask: Mask | None = None,
    sinks: Tensor | None = None,
    **scores: Unpack[ScoreArguments],
) -> Problem:
    """Validates a call of `attention_varlen`; errors name the argument, its value and the rule."""
    is_paged = block_table is not None
    check_tensors(
        q, k, v, ("length", "heads", "width"), key_dimensions=PAGE_DIMENSIONS if is_paged else None
    )
    bias = scores.get("bias")
    check_windows(mask, "for packed sequences")
    check_alibi_or_none(bias, "for packed sequences")
    align = _align(mask, bias, scores.get("relative"))
    packed = one_entry(q)
    check_sinks(sinks, packed)
    layout = _layout(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    keys = (k, v) if is_paged else (one_entry(k), one_entry(v))
    shape = shape_of(packed, *keys, layout)
    bottom_right = align == "bottom_right"
    sequences = cu_seqlens_q.shape[0] - 1
    options = check_scores(
        packed, shape.M, shape.N, sequences=sequences, bottom_right=bottom_right, **scores
    )
    return Problem(shape, resolve_windows(mask, align), options, layout)


def _align(mask: Mask | None, bias: object, relative: object) -> Align:
    """Returns the align that windows and biases share; raises ValueError if they differ."""
    aligns = bounded_aligns(mask)
    if len(aligns) > 1:
        raise ValueError(
            "mask must have a single align for packed sequences, got both 'top_left' and "
            "'bottom_right'"
        )
    align, name = (aligns.pop() if aligns else None), "mask"
    for other, given in (("bias", bias), ("relative", relative)):
        if not isinstance(given, Alibi | Relative):
            continue
        if align not in (None, given.align):
            raise ValueError(
                f"{name} and {other} must have the same align for packed sequences, got "
                f"{align!r} and {given.align!r}"
            )
        align, name = given.align, other
    return align or "top_left"


def _layout(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    block_table: Tensor | None,
) -> Layout:
    cu_seqlens_q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    max_seqlen_q = longest("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    if cu_seqlens_k is None and block_table is not None:
        raise ValueError("cu_seqlens_k must be a tensor with block_table, got None")
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    else:
        cu_seqlens_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have the same shape, got "
            f"{tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    sequences, total_k = cu_seqlens_q.shape[0] - 1, k.shape[0]
    if block_table is not None:
        check_block_table(block_table, sequences, q, k)
        total_k = sequences * capacity(k, block_table)
    max_seqlen_k = longest("k", cu_seqlens_k, total_k, max_seqlen_k)
    table = None if block_table is None else checked_table(k, cu_seqlens_k, block_table)
    offsets_q, offsets_k = (x.to(torch.int32).contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
    return Layout(offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, block_table=table)


def check_cu_seqlens(name: str, cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """Checks all but the values; returns cu_seqlens, on the CPU a private copy."""
    check_tensor(name, cu_seqlens, INDICES, device)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} must be (B + 1,), got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.shape[0] > 1 << 31:
        raise ValueError(
            f"{name} must have fewer than 2^31 sequences, got {cu_seqlens.shape[0] - 1}"
        )
    check_storage(((name, cu_seqlens),))
    return private_copy(cu_seqlens)


def longest(side: str, cu_seqlens: Tensor, total: int, max_seqlen: int | None) -> int:
    """Returns max_seqlen, or the length of the longest sequence if it is None.

    The values of cu_seqlens are read and checked if max_seqlen is None, and in eager mode on the
    CPU, where reading neither synchronises nor breaks a graph.
    """
    if total >= 1 << 31:
        raise ValueError(f"{side} must have fewer than 2^31 rows, got {total}")
    if max_seqlen is not None:
        check_int(f"max_seqlen_{side}", max_seqlen, 0, (1 << 31) - 1, "an int or None")
        if not values_are_readable(cu_seqlens):
            return max_seqlen
    elif (
        cu_seqlens.is_meta
        or torch_private.is_fake(cu_seqlens)
        or torch_private.is_batched(cu_seqlens)
    ):
        raise ValueError(
            f"max_seqlen_{side} must be an int, got None, and cu_seqlens_{side} has no values"
        )
    name = f"cu_seqlens_{side}"
    starts = read_starts(name, cu_seqlens, total, side)
    lengths = [end - start for start, end in pairwise(starts)]
    length = max(lengths, default=0)
    if max_seqlen is not None and max_seqlen < length:
        raise ValueError(
            f"max_seqlen_{side} must be at least {length}, the longest length in {name}, "
            f"got {max_seqlen}"
        )
    return length if max_seqlen is None else max_seqlen


def read_starts(name: str, cu_seqlens: Tensor, total: int, side: str) -> list[int]:
    """Returns the values of cu_seqlens; raises unless they divide the `total` rows of `side`."""
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0:
        raise ValueError(f"{name} must start at 0, got {starts[0]}")
    for b, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise ValueError(f"{name} must not decrease, got {start}, then {end} at {b + 1}")
    if starts[-1] > total:
        raise ValueError(f"{name} must end within the {total} rows of {side}, got {starts[-1]}")
    return starts
