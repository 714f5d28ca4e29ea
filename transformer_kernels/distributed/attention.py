"""The public operators: exact attention over a sequence that is divided over processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from ..common.argument_checks import check_bool
from ..dispatch.autocast import cast_for_autocast
from ..dispatch.run import run
from ..scores.sinks import join_sinks
from . import ring
from .arguments import Arguments, DividedOptions, checked
from .head_shards import HeadShards
from .peers import Group, Peers
from .plan import Plan
from .rectangles import Undivided
from .sequence import SequenceLayout, check_layout


class _AllToAllOptions(DividedOptions, total=False):
    group: Group
    layout: SequenceLayout


class _RingOptions(_AllToAllOptions, total=False):
    heads_group: Group


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_RingOptions],
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_RingOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_RingOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    heads_group: Group = None,
    layout: SequenceLayout = "zigzag",
    return_lse: bool = False,
    **options: Unpack[DividedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention over a sequence whose tokens are divided over the ranks of a group.

    Every rank passes the queries, keys and values of its tokens and gets the outputs of its
    queries: those of `attention` over the undivided sequence, to rounding. Each rank receives the
    keys and values that its queries see, while it computes with those that have arrived. No rank
    has the keys of more than three shards at a time.

    All ranks call it with the same arguments, except for tensors by token. Tensors by token are
    shards, made by `shard_sequence`: q, k, v, segments and positions, and the rows of dense masks
    and biases, which have all columns. Windows, key ranges and block layouts are those of the
    undivided sequence. Tensors that every rank has, such as tables by distance, slopes, sinks and
    biases with one row, get the gradient of this rank's queries; sum it over the ranks, as for
    parameters.

    Args:
        q: queries (B, H_q, M / P, D) of this rank, P ranks in all.
        k: keys (B, H_kv, N / P, D).
        v: values (B, H_kv, N / P, D_v).
        group: process group. Default: the default group. That of a one-dimensional DeviceMesh is
            `mesh.get_group()`.
        heads_group: second process group, for a two-dimensional grid of processes. Within it, heads
            are exchanged for sequence first; see `all_to_all_attention`. Its ranks have contiguous
            parts of a shard of `group`.
        layout: "zigzag", with the same work on all ranks under a causal mask, or "contiguous".
        return_lse: also returns the log-sum-exp of the scores.
        options: `mask`, `bias`, `relative`, `scale`, `softcap`, `dropout_p`, `seed`, `sinks` and
            `backend`, as for `attention`. The dropout mask is that of the undivided call; with
            dropout, pieces must have a multiple of 16 tokens. Without a seed, the first
            rank draws one. With `check=False`, the ranks do not compare their arguments first.

    Returns:
        o (B, H_q, M / P, D_v) in q's dtype; with `return_lse`, the pair (o, lse). lse (B, H_q,
        M / P) is the natural-log log-sum-exp over all keys, in float32 (float64). Differentiable
        once.

    Raises:
        TypeError, ValueError: as for `attention`, and if the ranks' arguments differ; on all ranks,
            before they exchange keys.
        RuntimeError: a rank ends, or does not answer within the time-out of the process group.

    Source: Liu et al. 2023, arXiv:2310.01889.
    """
    check_layout(layout)
    check_bool("return_lse", return_lse)
    peers = Peers.of(group)
    heads = peers.alone() if heads_group is None else Peers.of(heads_group, "heads_group")
    o, lse = divided(Arguments(**options), q, k, v, peers, layout, heads, "contiguous")
    return (o, lse) if return_lse else o


@overload
def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_AllToAllOptions],
) -> Tensor: ...


@overload
def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_AllToAllOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_AllToAllOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    layout: SequenceLayout = "contiguous",
    return_lse: bool = False,
    **options: Unpack[DividedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention over a divided sequence, by exchanging heads for sequence.

    Each rank gets all tokens of H_q / P query heads, runs `attention` on them, and gives the
    outputs back. The result has the bits of the undivided call where a head's bits do not depend on
    other heads (docs/reliability.md). Keys and values are sent once, instead of P - 1 times; the
    number of heads limits the number of ranks.

    Args:
        q: queries (B, H_q, M / P, D) of this rank; H_q is a multiple of P.
        k: keys (B, H_kv, N / P, D); H_kv is a multiple of P, or a divisor: ranks then share heads.
        v: values (B, H_kv, N / P, D_v).
        group: process group. Default: the default group.
        layout: layout of the sequence, as in `shard_sequence`.
        return_lse: also returns the log-sum-exp of the scores.
        options: as for `ring_attention`; dropout takes any length.

    Returns:
        o (B, H_q, M / P, D_v), or (o, lse), as `ring_attention`. Differentiable to any order.

    Raises:
        TypeError, ValueError: as for `ring_attention`.

    Source: Jacobs et al. 2023, arXiv:2309.14509.
    """
    check_layout(layout)
    check_bool("return_lse", return_lse)
    heads = Peers.of(group)
    o, lse = divided(Arguments(**options), q, k, v, heads.alone(), layout, heads, layout)
    return (o, lse) if return_lse else o


@torch.compiler.disable  # type: ignore[untyped-decorator]
def divided(
    arguments: Arguments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peers: Peers,
    layout: SequenceLayout,
    heads: Peers,
    heads_layout: SequenceLayout,
    shared: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Checks the call, and runs a ring over `peers` on the heads of this rank of `heads`.

    `shared`: see `checked`.
    """
    q, k, v = cast_for_autocast(q, k, v)
    arguments, call = checked(arguments, q, k, v, layout, (peers, heads), shared)
    shards = HeadShards(heads, q.shape[1], k.shape[1], heads_layout)
    if heads.size > 1:
        arguments = shards.arguments(arguments)
        q, k, v = shards.queries(q), shards.keys(k), shards.keys(v)
        call = arguments.call(q, k, v, peers.size).from_head(shards.first)
    o, lse = _attend(call, q, k, v, peers, layout, arguments.backend)
    if arguments.sinks is not None:
        o, lse = join_sinks(o, lse, arguments.sinks)
    return shards.tokens(o), shards.tokens(lse)


def _attend(
    call: Undivided,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peers: Peers,
    layout: SequenceLayout,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if peers.size == 1:
        return run(call.problem, q, k, v, sinks=None, backend=backend)
    return ring.run_ring(Plan(call, peers, layout), q, k, v, backend)
