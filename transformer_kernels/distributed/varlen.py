"""`ring_attention_varlen`: attention over packed documents that are divided over processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..common.argument_checks import check_bool
from ..dispatch import division
from ..dispatch.autocast import cast_for_autocast
from ..functional.varlen import attention_varlen
from ..masks.constraints import UNBOUNDED, Window
from ..masks.mask import Mask
from ..masks.resolved import resolve_windows
from ..problem.checks import check_tensors, check_windows
from ..problem.varlen import one_entry
from .agreement import errors_on_all_ranks
from .arguments import Arguments
from .attention import divided
from .documents import DocumentShard, check_documents
from .peers import Group, Peers


class _Options(TypedDict, total=False):
    group: Group
    mask: Mask | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    backend: str
    check: bool


@overload
def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    group: Group = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    check: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention for each of several packed documents that are divided over the ranks.

    Every rank passes the queries, keys and values of its tokens, shards made by `shard_documents`,
    and gets the outputs of its queries: those of `attention_varlen` over the packed documents, to
    rounding. Every rank receives the keys and values of all others, as in `ring_attention`; under
    a causal mask all ranks have the same number of visible pairs.

    Biases, tables by distance and dropout are not offered. For these, pack the documents into one
    row, and call `ring_attention` with `Mask.segments` of its shards.

    Args:
        q: queries (T_local, H_q, D) of this rank in float16, bfloat16, float32 or float64.
        k: keys (T_local, H_kv, D) with q's dtype and device; H_q is a multiple of H_kv.
        v: values (T_local, H_kv, D_v) with q's dtype and device.
        cu_seqlens: cumulative lengths (documents + 1,) of the packed documents, as in
            `shard_documents`; int32 or int64 on q's device, the same on every rank.
        group: process group. Default: the default group.
        mask: windows and causal masks, applied to every document.
        scale: factor of q k^T. Default: 1/sqrt(D).
        softcap: bound of the scores: softcap * tanh(scale * q k^T / softcap). Default: no bound.
        sinks: attention sinks (H_q,), the same on every rank. Their gradient is that of this rank's
            queries; sum it over the ranks, as for parameters.
        return_lse: also returns the log-sum-exp of the scores.
        backend: as for `attention`.
        check: with False, the ranks do not compare their arguments first.

    Returns:
        o (T_local, H_q, D_v) in q's dtype; with `return_lse`, the pair (o, lse). lse (H_q, T_local)
        is the natural-log log-sum-exp in float32 (float64 for float64 inputs), including the sinks.
        A query without a visible key has o = 0 and lse = -inf (with sinks, lse = the sink). Padding
        has o = 0, lse = -inf and gradients of 0; q, k and v may hold anything there. Differentiable
        once.

    Raises:
        TypeError, ValueError: as for `attention_varlen`, and if the ranks' arguments differ; on all
            ranks, before they exchange keys. The values of cu_seqlens are checked and compared on
            the CPU only.
        RuntimeError: a rank ends, or does not answer within the time-out of the process group.
    """
    check_bool("return_lse", return_lse)
    check_bool("check", check)
    arguments = Arguments(
        mask=mask, scale=scale, softcap=softcap, sinks=sinks, backend=backend, check=check
    )
    o, lse = _attend(arguments, q, k, v, cu_seqlens, Peers.of(group))
    return (o, lse) if return_lse else o


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    arguments: Arguments, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, peers: Peers
) -> tuple[Tensor, Tensor]:
    """Runs a ring on the documents as one packed row, a batch of one entry."""
    with errors_on_all_ranks((peers,), check=arguments.check):
        q, k, v = cast_for_autocast(q, k, v)
        check_tensors(q, k, v, ("length", "heads", "width"))
        if q.shape[0] != k.shape[0]:
            raise ValueError(
                f"q and k must have the same length, got {q.shape[0]} and {k.shape[0]}"
            )
        check_windows(arguments.mask, "for documents")
        cu_seqlens = check_documents(cu_seqlens, q, q.shape[0] * peers.size, "q of all ranks")
    window = _window(arguments.mask)
    if peers.size == 1:
        with division.divided(None):
            return attention_varlen(
                q, k, v, cu_seqlens, mask=Mask((window,)), scale=arguments.scale,
                softcap=arguments.softcap, sinks=arguments.sinks, return_lse=True,
                backend=arguments.backend,
            )  # fmt: skip
    shard = DocumentShard.of(cu_seqlens, q.shape[0], peers.rank, peers.size)
    arguments = replace(arguments, mask=_mask(shard, window))
    o, lse = divided(
        arguments, *map(one_entry, (q, k, v)), peers, "contiguous", peers.alone(), "contiguous",
        shared={"cu_seqlens": cu_seqlens},
    )  # fmt: skip
    o, lse = o.squeeze(0).transpose(0, 1), lse.squeeze(0)
    if arguments.sinks is not None:
        lse = lse.masked_fill(shard.document < 0, float("-inf"))
    return o, lse


def _window(mask: Mask | None) -> Window:
    """Merges windows. Both origins are the same, because a document has as many keys as queries."""
    resolved = resolve_windows(mask, "top_left")
    low, high = resolved.diagonal_low, resolved.diagonal_high
    return Window(
        None if low == -UNBOUNDED else -low, None if high == UNBOUNDED else high, "top_left"
    )


def _mask(shard: DocumentShard, window: Window) -> Mask:
    """Returns the mask of the packed row. Padding matches nothing, padding included."""
    q_ids, position = shard.document[None], shard.position[None]
    mask = Mask.segments(q_ids, q_ids.masked_fill(q_ids < 0, -2))
    if window.is_bounded:
        mask &= Mask.positions(position, position, window.left, window.right)
    return mask
