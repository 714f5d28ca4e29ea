"""Attention by locality-sensitive hashing, in chunks of tokens that are sorted by hash.

Queries and keys are shared. In every hash round r:

    k_j = q_j / |q_j|
    h_r(j) = argmax [q_j R_r; -q_j R_r]          R_r random: near directions tend to share a bucket
    order_r = tokens sorted by (h_r, position), cut into chunks of m

A query sees the keys of its chunk and of the chunk before, except its own and, if causal, those at
later positions. The chunks of all rounds form one ring: before the first chunk of a round stands
the last one of the round before. Rounds are merged by lse:

    o_i = Σ_r softmax_r(lse_r,i) o_r,i           v_i, if no round shows a key

The result equals dense attention with the scores s_ij + log N_ij, where N_ij is the number of times
that query i meets key j. Time and memory are linear in the length, except for the sort.

Source: Reformer: The Efficient Transformer (Kitaev et al., 2020, arXiv:2001.04451), section 2. The
ring and the epsilon of the norm are those of the authors' code (google/trax).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.argument_checks import INTEGERS, check_tensor
from ..dispatch.division import check_undivided
from ..functional.attention import attention
from ..masks.mask import Mask
from .attention import attend
from .lsh_chunks import SortedChunks
from .options import AttnImplementation

_EPS = 1e-6
"""Added to the mean square of a key"""


def lsh_attention(
    q: Tensor,
    v: Tensor,
    order: Tensor,
    *,
    chunk: int,
    causal: bool = True,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    attn_implementation: AttnImplementation = "fused",
) -> Tensor:
    """Self-attention with shared queries and keys, over the keys that meet a query in a chunk.

    Args:
        q: queries, whose directions are the keys: (B, H, T, D).
        v: values (B, H, T, D_v).
        order: positions sorted by hash, as `sorted_by_bucket` returns them: (B, H, rounds, T)
            integers, a permutation of 0 to T - 1 in each row.
        chunk: number of tokens of a chunk.
        causal: True if a query sees earlier positions only.
        scale: multiplies q kᵀ; 1/sqrt(D) unless given, as in the paper. The authors' code has 1.
        key_lengths: integers (B,): keys at and after the length are padding; T unless given.
        attn_implementation: "eager", "fused" or "sdpa". Only "fused" works in chunks; the others
            store a bias of B * H * T * T elements.

    Returns:
        o (B, H, T, D_v) in v's dtype.

    Raises:
        TypeError, ValueError: a tensor is invalid for `attention`, or has other sizes.
    """
    check_undivided("lsh_attention")
    _check(q, v, order, key_lengths)
    chunks = SortedChunks(order, chunk)
    T, D = q.shape[2:]
    scale = D**-0.5 if scale is None else scale
    k = _normalized(q)
    if T == 0:
        return v + q.sum()  # empty, with both gradients
    if attn_implementation != "fused":
        bias = _meetings(chunks, causal, key_lengths).to(q.dtype).log()
        return attend(q, k, v, bias=bias, scale=scale, attn_implementation=attn_implementation)
    o, lse = _attention_by_chunk(
        chunks.sort(q), chunks.sort_pairs(k), chunks.sort_pairs(v), *chunks.positions(key_lengths),
        length=T, causal=causal, scale=scale,
    )  # fmt: skip
    weights, alone = chunks.softmax_over_rounds(lse)
    if order.shape[2] > 1:
        o = o * weights.to(o.dtype)[..., None]
    return torch.where(alone[..., None], v, chunks.sum_rounds(o))


def _normalized(q: Tensor) -> Tensor:
    """q / sqrt(|q|² + D eps), in q's dtype."""
    D = q.shape[3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(q, dim=-1, keepdim=True, dtype=dtype)
    k: Tensor = q * (norm.square() + D * _EPS).rsqrt().to(q.dtype)
    return k


def _check(q: Tensor, v: Tensor, order: Tensor, key_lengths: Tensor | None) -> None:
    if not (q.dim() == v.dim() == 4 and q.shape[:3] == v.shape[:3]):
        raise ValueError(
            f"q and v must be (B, H, T, D) of one B, H and T, "
            f"got shapes {tuple(q.shape)} and {tuple(v.shape)}"
        )
    B, H, T, _ = q.shape
    check_tensor("order", order, INTEGERS, q.device, "a tensor of integers")
    if order.dim() != 4 or order.shape != (B, H, max(order.shape[2], 1), T):
        raise ValueError(
            f"order must be ({B}, {H}, rounds, {T}) with at least one round, "
            f"got shape {tuple(order.shape)}"
        )
    if key_lengths is None:
        return
    check_tensor("key_lengths", key_lengths, INTEGERS, q.device, "a tensor of integers")
    if key_lengths.shape != (B,):
        raise ValueError(f"key_lengths must be ({B},), got shape {tuple(key_lengths.shape)}")


def _attention_by_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    length: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o (G, C, m, D_v) and lse (G, C, m) of C chunks: q (G, C, m, D), k (G, C, 2 m, D)."""
    if causal:
        mask = Mask.positions(q_pos, k_pos, right=-1)
        return attention(q, k, v, mask=mask, scale=scale, return_lse=True)
    # Segments are given for each batch entry, so that chunks become entries. This copies k and v.
    shape = q.shape[:2]
    q, k, v, q_pos, k_pos = (x.flatten(0, 1) for x in (q, k, v, q_pos, k_pos))
    not_itself = Mask.segments(q_pos, k_pos, equal=False)
    not_padding = Mask.positions(q_pos.new_zeros(1, q_pos.shape[1]), k_pos, right=length - 1)
    o, lse = attention(
        q[:, None], k[:, None], v[:, None],
        mask=not_itself & not_padding, scale=scale, return_lse=True,
    )  # fmt: skip
    return o[:, 0].unflatten(0, shape), lse[:, 0].unflatten(0, shape)


def _meetings(chunks: SortedChunks, causal: bool, key_lengths: Tensor | None) -> Tensor:
    """N_ij, 0 for hidden keys: (B, H, T, T). A query without a key meets itself."""
    T = chunks.order.shape[3]
    N = chunks.meetings()
    i = torch.arange(T, device=N.device)
    visible = i[:, None] > i if causal else i[:, None] != i
    if key_lengths is not None:
        visible = visible & (i < key_lengths[:, None, None, None])
    N = N * visible
    alone = (N == 0).all(dim=-1, keepdim=True)
    return torch.where(alone & (i[:, None] == i), 1, N)
