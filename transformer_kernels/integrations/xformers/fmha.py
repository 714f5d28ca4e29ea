"""`xformers.ops.fmha`: memory-efficient attention, by name and signature.

Inputs are (B, length, H, width), (B, length, width) of one head, or (B, length, G, H, width) of G
groups of H heads. The heads of a group share their keys if key and value are expanded along H.

Source: Lefaudeux et al. 2022, xFormers; Rabe and Staats 2021, arXiv:2112.05682.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...common.argument_checks import FLOATS, check_bool, check_number, check_tensor, shown
from ...dispatch.autocast import cast_bias, cast_for_autocast
from ...functional.attention import attention
from ...functional.varlen import attention_varlen
from ...masks.mask import Mask
from ...problem.checks import check_tensors
from ..paged_varlen import attend_pages
from . import attn_bias as attn_bias
from .attn_bias import BlockDiagonalMask, LowerTriangularMask
from .base import AttentionBias, known, window_of

__all__ = [
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]
_NAMES = ("query", "key", "value")


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes attention as `xformers.ops.memory_efficient_attention` does; differentiable in
    query, key, value and a bias tensor.

    Args:
        query: (B, M, H, K) in float16, bfloat16, float32 or float64, any strides; or (B, M, K), or
            (B, M, G, H, K).
        key: (B, N, H, K), with as many dimensions as query. H may be a divisor of query's heads;
            with five dimensions the heads of a group share keys if key and value are expanded.
        value: (B, N, H, K_v).
        attn_bias: which keys are visible, an object of `attn_bias` or of xFormers' module of that
            name; or a tensor in query's dtype or float32 that is added to the scores, broadcastable
            to (B, H, M, N), (B, M, N) or (B, G, H, M, N). Packed sequences need B = 1.
        p: dropout probability of the attention weights; 0 in evaluation.
        scale: factor of query key^T. Default: 1/sqrt(K).
        op: None; xFormers' operators do not exist here.
        output_dtype: floating-point dtype of the result, which is rounded to query's dtype first.

    Returns:
        (B, M, H, K_v), or with query's other dimensions, in `output_dtype`, by default query's. A
        query without a visible key, or after the last sequence, gets 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value.

    Source: xFormers 0.0.35, xformers/ops/fmha/__init__.py.
    """
    _check_op(op)
    return _converted(_attend(query, key, value, attn_bias, p, scale)[0], output_dtype)


memory_efficient_attention_forward = memory_efficient_attention
"""Differentiable too; xFormers' has no gradient."""


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns o of `memory_efficient_attention` and the log-sum-exp of the scores.

    Args:
        query: as in `memory_efficient_attention`, like the other arguments.
        key: see there.
        value: see there.
        attn_bias: see there.
        p: see there.
        scale: see there.
        op: see there.
        output_dtype: see there.

    Returns:
        (o, lse), both differentiable. lse (B, H, M), (B, 1, M) or (B, G, H, M), by the dimensions
        of query, is the natural-log log-sum-exp in float32 (float64 for float64 inputs); -inf for a
        query without a visible key. Packed sequences have one row of it, B = 1.

    Raises:
        TypeError, ValueError: as in `memory_efficient_attention`.

    Source: xFormers 0.0.35, xformers/ops/fmha/__init__.py.
    """
    _check_op(op)
    o, lse = _attend(query, key, value, attn_bias, p, scale, return_lse=True)
    assert lse is not None
    return _converted(o, output_dtype), lse


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse) of a part of the keys, for `merge_attentions`; differentiable.

    Arguments and errors are those of `memory_efficient_attention_forward_requires_grad`; by default
    o is in float32 (float64 for float64 inputs), after it was rounded to query's dtype.
    """
    o, lse = memory_efficient_attention_forward_requires_grad(
        query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype
    )
    return (o if output_dtype is not None else o.to(lse.dtype)), lse


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merges results of the same queries for disjoint parts of the keys; differentiable.

    Args:
        attn_split: (parts, B, M, H, K_v) or (parts, B, M, G, H, K_v), or a sequence of parts.
        lse_split: (parts, B, H, M) or (parts, B, G, H, M), or a sequence of parts.
        write_lse: also returns the log-sum-exp.
        output_dtype: dtype of the result. Default: that of attn_split.

    Returns:
        The results of all keys, o = sum exp(lse_i - lse) o_i and lse = log sum exp lse_i; lse is
        None without `write_lse`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: there is no part, or the shapes of parts do not fit.

    Source: Juravsky et al. 2024, arXiv:2402.05099; xFormers 0.0.35.
    """
    check_bool("write_lse", write_lse)
    parts = [_parts("attn_split", attn_split), _parts("lse_split", lse_split)]
    for o, lse in zip(*parts, strict=False):
        rows = o.movedim(1, -2).shape[:-1]
        if len(parts[0]) != len(parts[1]) or o.dim() not in (4, 5) or lse.shape != rows:
            raise ValueError(
                "attn_split and lse_split must have as many parts each, (B, M, H, K) and (B, H, M) "
                f"or with groups, got {shown(attn_split)} and {shown(lse_split)}"
            )
    os, lses = (torch.stack(one) for one in parts)
    lse = torch.logsumexp(lses, dim=0)
    # -inf - -inf: a query without a visible key in any part has weights of 0
    weights = (lses - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    o = (os * weights.movedim(-1, 2)[..., None]).sum(dim=0)
    return _converted(o.to(parts[0][0].dtype), output_dtype), lse if write_lse else None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    p: float,
    scale: float | None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns o in query's dimensions, and lse if it is asked for."""
    if not 0.0 <= check_number("p", p) <= 1.0:
        raise ValueError(f"p must be between 0 and 1, got {p}")
    q, k, v = _by_heads(query, key, value)
    options: dict[str, Any] = {"scale": scale, "dropout_p": p}
    if known(bias) and hasattr(bias, "q_seqinfo"):
        o, lse = _attend_packed(q, k, v, bias, options, return_lse)
    else:
        o, lse = _attend_dense(q, k, v, bias, options, query, return_lse)
    if query.dim() == 5 and lse is not None:
        lse = lse.unflatten(1, query.shape[2:4])
    return o.reshape(*query.shape[:-1], value.shape[-1]), lse


def _by_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v as (B, length, heads, width)."""
    for name, x in zip(_NAMES, (query, key, value), strict=True):
        check_tensor(name, x, FLOATS, wanted="a floating-point tensor")
        if x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            raise ValueError(
                f"{name} must be (B, length, H, K), (B, length, K) or (B, length, G, H, K), as the "
                f"other tensors, got shape {tuple(x.shape)}"
            )
    if query.dim() == 4:
        return query, key, value
    if query.dim() == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    G, H = query.shape[2:4]
    for name, x in (("key", key), ("value", value)):
        if x.shape[2] != G or x.shape[3] not in (1, H):
            raise ValueError(
                f"{name} must have query's groups and heads, {G} and {H} (or 1), "
                f"got shape {tuple(x.shape)}"
            )
    if _is_shared(key) and _is_shared(value):
        key, value = (x[:, :, :, 0] if x.shape[3] > 1 else x.squeeze(3) for x in (key, value))
        return query.flatten(2, 3), key, value
    key, value = (x.expand(-1, -1, -1, H, -1).flatten(2, 3) for x in (key, value))
    return query.flatten(2, 3), key, value


def _is_shared(x: Tensor) -> bool:
    """True if the heads of a group have the same keys, whose gradients autograd adds up. A leaf has
    gradients by head."""
    return x.shape[3] == 1 or (x.stride(3) == 0 and not (x.requires_grad and x.is_leaf))


def _attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    options: dict[str, Any],
    query: Tensor,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns o (B, M, heads, K_v) and lse (B, heads, M)."""
    mask: Mask | None = None
    added = bias
    if known(bias):
        mask, added = window_of(bias), getattr(bias, "_bias", None)
    if added is not None:
        added = _score_bias(added, query, k)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    try:
        if not return_lse:
            return attention(*heads_first, mask=mask, bias=added, **options).transpose(1, 2), None
        o, lse = attention(*heads_first, mask=mask, bias=added, **options, return_lse=True)
    except (TypeError, ValueError):
        cast_q, cast_k, cast_v = cast_for_autocast(*heads_first)
        check_tensors(cast_q, cast_k, cast_v, names=_NAMES)
        if added is not None:
            dtypes = cast_q.dtype, torch.float32
            check_tensor("attn_bias", cast_bias(added, cast_q), dtypes)
            if added.device != q.device:
                raise ValueError(
                    f"attn_bias is on {added.device}, query is on {q.device}"
                ) from None
        raise
    return o.transpose(1, 2), lse


def _score_bias(bias: Tensor, query: Tensor, k: Tensor) -> Tensor:
    """Returns the tensor with the dimensions (B, heads, M, N), some of them of size 1."""
    if not isinstance(bias, Tensor):
        raise TypeError(
            "attn_bias must be a tensor, a bias of transformer_kernels.integrations.xformers.fmha."
            f"attn_bias or of xFormers with the same name, or None, got {type(bias).__name__}"
        )
    check_tensor("attn_bias", bias, FLOATS, wanted="a floating-point tensor")
    wanted = (query.shape[0], *query.shape[2:-1], query.shape[1], k.shape[1])
    given = (1,) * (len(wanted) - bias.dim()) + tuple(bias.shape)
    if len(given) != len(wanted) or any(
        have not in (1, want) for have, want in zip(given, wanted, strict=True)
    ):
        raise ValueError(f"attn_bias must broadcast to {wanted}, got {tuple(bias.shape)}")
    bias = bias[(None,) * (len(wanted) - bias.dim())]
    if query.dim() == 3:
        return bias.unsqueeze(1)
    if query.dim() == 4:
        return bias
    heads = (1, 1) if given[1:3] == (1, 1) else wanted[1:3]
    return bias.expand(-1, *heads, -1, -1).flatten(1, 2)


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, options: dict[str, Any], return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns o (1, M, heads, K_v) and lse (1, heads, M)."""
    if not q.shape[0] == k.shape[0] == v.shape[0] == 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"attn_bias of packed sequences needs a batch size of 1, got {shapes}")
    q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)  # q[0] would copy in the backward pass
    q_info, k_info = bias.q_seqinfo, bias.k_seqinfo
    _check_rows("query", q, q_info)
    mask = window_of(bias)
    options |= {
        "mask": mask if mask.constraints else None,
        "max_seqlen_q": max(q_info.max_seqlen, 0), "max_seqlen_k": max(k_info.max_seqlen, 0),
    }  # fmt: skip
    try:
        if getattr(k_info, "seqlen", None) is not None:
            o, lse = _attend_cache(q, k, v, bias, options)
        else:
            _check_rows("key", k, k_info)
            starts = q_info.seqstart, None if k_info is q_info else k_info.seqstart
            if not return_lse:
                return attention_varlen(q, k, v, *starts, **options)[None], None
            o, lse = attention_varlen(q, k, v, *starts, **options, return_lse=True)
    except (TypeError, ValueError):
        check_tensors(*cast_for_autocast(q, k, v), ("length", "heads", "width"), names=_NAMES)
        raise
    return o[None], lse[None]


def _attend_cache(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns o and lse for keys with room after each sequence, which is its page, or in pages."""
    info = bias.k_seqinfo
    page, table = getattr(bias, "page_size", info.padding), getattr(bias, "block_tables", None)
    pages = info.seqlen.shape[0] if table is None else k.shape[0] // page
    if pages * page != k.shape[0] or k.shape[0] != v.shape[0]:
        wanted = f"a multiple of {page}" if table is not None else f"{pages * page}"
        rows = f"{k.shape[0]} and {v.shape[0]}"
        raise ValueError(f"key and value must have {wanted} rows for attn_bias, got {rows}")
    if table is None:
        table = torch.arange(pages, device=k.device)[:, None]
    ends = pad(info.seqlen.cumsum(0, dtype=torch.int32), (1, 0))
    k, v = (x.unflatten(0, (pages, page)) for x in (k, v))
    return attend_pages(q, k, v, bias.q_seqinfo.seqstart, ends, table, **options)


def _check_rows(name: str, x: Tensor, info: Any) -> None:
    """Raises unless x holds the sequences, on their device."""
    if info.seqstart.device != x.device:
        raise ValueError(
            f"attn_bias is on {info.seqstart.device}, {name} is on {x.device}; "
            f"use attn_bias.to({name}.device)"
        )
    if info.seqstart_py[-1] > x.shape[0]:
        raise ValueError(
            f"attn_bias has {info.seqstart_py[-1]} rows of {name}, got {name} with {x.shape[0]}"
        )


def _check_op(op: object) -> None:
    if op is not None:
        raise ValueError(f"op must be None, which chooses the kernels by the call, got {shown(op)}")


def _converted(o: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return o
    if dtype not in FLOATS:
        raise TypeError(f"output_dtype must be a floating-point dtype or None, got {shown(dtype)}")
    return o.to(dtype)


def _parts(name: str, parts: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(parts, Tensor):
        check_tensor(name, parts, FLOATS, wanted="floating-point tensors")
        parts = list(parts.unbind(0)) if parts.dim() else []
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError(f"{name} must hold at least one part, got {shown(parts)}")
    for x in parts:
        check_tensor(name, x, FLOATS, wanted="floating-point tensors")
    return cast(list[Tensor], list(parts))
