"""The division of packed documents over processes: of each, chunks from both of its ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.argument_checks import INDICES, check_int, check_tensor, values_are_readable
from ..problem.varlen import check_cu_seqlens, read_starts
from .collectives import all_gather
from .peers import Group
from .sequence import check_shard


@dataclass(frozen=True, eq=False)
class DocumentShard:
    """Tokens of one rank, in order: by document, then by position. Padding comes last.

    Each is (T_local,) in int64, and -1 in padding.
    """

    index: Tensor
    """Row of the packed tensor."""
    document: Tensor
    position: Tensor
    """Index of the token in its document."""

    @staticmethod
    def of(cu_seqlens: Tensor, length: int, rank: int, size: int) -> DocumentShard:
        """Returns the shard of `length` tokens of a rank, without synchronization with a GPU.

        A document of L tokens is cut into 2 P chunks, P = `size`. Pair p is chunk p, the head, and
        chunk 2 P - 1 - p, the tail. It has L // P tokens, and one more if p < L % P; lengths of
        chunks differ by at most one.

        The ranks that get one token more follow those that did in the previous document. Numbers of
        tokens of the ranks thus differ by at most one over all documents. Among ranks with equally
        many tokens, pairs rotate from document to document.
        """
        starts = cu_seqlens.long()
        lengths = starts.diff(append=starts[-1:])  # the last one, 0, stands for padding
        pair = _pair(starts, lengths, rank, size)
        before, after = _tokens(lengths, pair, size), _tokens(lengths, pair + 1, size)
        # Heads hold n // 2 of the first n tokens of pairs, tails the others.
        head, head_length = before // 2, after // 2 - before // 2
        tail = lengths - (after - after // 2)
        counts = after - before
        ends = counts.cumsum(0)
        slot = torch.arange(length, device=starts.device)
        document = torch.searchsorted(ends[:-1], slot, right=True)
        offset = slot - (ends - counts)[document]
        position = offset + torch.where(
            offset < head_length[document], head[document], (tail - head_length)[document]
        )
        index = starts[document] + position
        padding = slot >= ends[-1]
        return DocumentShard(*(x.masked_fill(padding, -1) for x in (index, document, position)))


def _pair(starts: Tensor, lengths: Tensor, rank: int, size: int) -> Tensor:
    """Returns the pair of chunks that a rank has of each document."""
    one_more = lengths % size
    place = (rank - starts) % size
    number = torch.arange(len(lengths), device=lengths.device)
    return torch.where(
        place < one_more,
        (place + number) % one_more.clamp(min=1),
        one_more + (place - one_more + number) % (size - one_more),
    )


def _tokens(lengths: Tensor, pairs: Tensor, size: int) -> Tensor:
    """Returns the number of tokens of the first `pairs` pairs of each document."""
    return pairs * (lengths // size) + torch.minimum(pairs, lengths % size)


def shard_documents(x: Tensor, cu_seqlens: Tensor, *, dim: int = 0, group: Group = None) -> Tensor:
    """Returns this rank's tokens of packed documents that every rank has, without communication.

    For inputs, token ids, positions and labels. Each document is divided over all P ranks, a chunk
    from its start and the chunk as far from its end to each: all ranks then have the same work
    under a causal mask. The tokens of a rank are in the order of the packed tensor.

    Args:
        x: tensor (..., T, ...) of any dtype, the same on every rank, with T packed tokens.
        cu_seqlens: cumulative lengths (documents + 1,), int32 or int64 on x's device, the same on
            every rank: 0, then the end of each document. Documents may be empty. Tokens after the
            last document are trailing padding, which no rank gets.
        dim: the dimension of the tokens.
        group: process group that the documents are divided over. Default: the default group.

    Returns:
        x with ceil(T / P) tokens, the last of which are 0 where a rank has fewer: at most one if x
        has no trailing padding. Differentiable.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or torch.distributed is not
            initialized. The values of cu_seqlens are checked on the CPU only.
    """
    peers, _, dim = check_shard(x, dim, group)
    cu_seqlens = check_documents(cu_seqlens, x, x.shape[dim], "x")
    length = -(-x.shape[dim] // peers.size)
    index = DocumentShard.of(cu_seqlens, length, peers.rank, peers.size).index
    padding = (index < 0).view(-1, *[1] * (x.dim() - 1 - dim))
    return x.index_select(dim, index.clamp(min=0)).masked_fill(padding, 0)


def unshard_documents(
    x: Tensor,
    cu_seqlens: Tensor,
    *,
    dim: int = 0,
    length: int | None = None,
    group: Group = None,
) -> Tensor:
    """Returns the packed tensor of the shards of all ranks, on every rank: the inverse of
    `shard_documents`.

    The gradient of a shard is summed over the ranks, as that of a loss that is a sum over ranks.

    Args:
        x: this rank's tokens (..., T_local, ...), T_local the same on every rank.
        cu_seqlens: cumulative lengths (documents + 1,), as in `shard_documents`.
        dim: the dimension of the tokens.
        length: T of the result, with rows of 0 after the last document. Default: the end of the
            last document; on a GPU, reading it synchronizes.
        group: process group. Default: the default group.

    Returns:
        The tensor (..., T, ...); differentiable to any order.

    Raises:
        TypeError, ValueError: as for `shard_documents`.
        ValueError: `length` does not hold the documents; on the CPU.
    """
    peers, _, dim = check_shard(x, dim, group)
    own = x.shape[dim]
    cu_seqlens = check_documents(cu_seqlens, x, own * peers.size, "x of all ranks")
    if length is None:
        length = int(cu_seqlens[-1])
    else:
        end = int(cu_seqlens[-1]) if values_are_readable(cu_seqlens) else 0
        check_int("length", length, end, wanted="an int or None")
    shards = (DocumentShard.of(cu_seqlens, own, rank, peers.size) for rank in range(peers.size))
    index = torch.cat([shard.index for shard in shards])
    index = index.masked_fill(index < 0, length).clamp(max=length)  # padding, into one row more
    gathered = all_gather(peers, x.transpose(0, dim))
    packed = gathered.new_zeros(length + 1, *gathered.shape[1:])
    return packed.index_copy(0, index, gathered)[:length].transpose(0, dim)


def check_documents(cu_seqlens: Tensor, x: Tensor, total: int, side: str) -> Tensor:
    """Returns cu_seqlens, on the CPU a private copy; raises unless they fit the `total` rows of
    `side`. Their values are checked on the CPU."""
    check_tensor("cu_seqlens", cu_seqlens, INDICES)
    if cu_seqlens.device != x.device:
        name = side.partition(" ")[0]
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, {name} is on {x.device}")
    cu_seqlens = check_cu_seqlens("cu_seqlens", cu_seqlens, x.device)
    if values_are_readable(cu_seqlens):
        read_starts("cu_seqlens", cu_seqlens, total, side)
    return cu_seqlens
