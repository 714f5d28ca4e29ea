"""The division of a sequence over processes: which tokens each rank has, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..common.argument_checks import check_int, shown
from .collectives import all_gather
from .peers import Group, Peers

SequenceLayout = Literal["zigzag", "contiguous"]
"""Tokens of rank r of P ranks, as equal chunks of the sequence.

- contiguous: chunk r of P.
- zigzag: chunks r and 2 P - 1 - r of 2 P. Under a causal mask all ranks have the same work.
"""


class Piece(NamedTuple):
    """Consecutive tokens of the sequence within a shard."""

    start: int
    """Index of the first token in the undivided sequence."""
    offset: int
    """Index of the first token in the shard."""
    length: int

    def part(self, first: int, end: int) -> Piece:
        """Returns the tokens from `first` to before `end`, indices in the undivided sequence."""
        return Piece(first, self.offset + first - self.start, end - first)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def local(self) -> slice:
        return slice(self.offset, self.offset + self.length)


def pieces_of(layout: SequenceLayout, length: int, rank: int, size: int) -> tuple[Piece, ...]:
    """Returns the pieces of a rank's shard, in order. `length` is that of the sequence."""
    if layout == "contiguous":
        chunks, chunk = [rank], length // size
    else:
        chunks, chunk = [rank, 2 * size - 1 - rank], length // (2 * size)
    if chunks[-1] == chunks[0] + 1:  # the last rank's chunks are neighbours
        return (Piece(chunks[0] * chunk, 0, 2 * chunk),)
    return tuple(Piece(c * chunk, n * chunk, chunk) for n, c in enumerate(chunks))


def check_layout(layout: SequenceLayout) -> None:
    if layout not in get_args(SequenceLayout):
        raise ValueError(f"layout must be 'zigzag' or 'contiguous', got {shown(layout)}")


def check_length(name: str, length: int, layout: SequenceLayout, size: int, heads: int = 1) -> None:
    """Raises ValueError unless the sequence divides into equal chunks, and those over `heads`."""
    chunks = (2 * size if layout == "zigzag" else size) * heads
    if length % chunks:
        raise ValueError(
            f"{name} must be a multiple of {chunks} for {size * heads} ranks in the layout "
            f"{layout!r}, got {length}: pad the sequence"
        )


def shard_sequence(
    x: Tensor,
    *,
    dim: int,
    group: Group = None,
    heads_group: Group = None,
    layout: SequenceLayout = "zigzag",
) -> Tensor:
    """Returns this rank's tokens of a tensor that every rank has, without communication.

    For inputs, positions, labels, segment ids, and the rows of dense masks and biases.

    Args:
        x: any tensor, the same on every rank.
        dim: the dimension of the tokens. Its size is a multiple of P (contiguous) or 2 P (zigzag)
            for P ranks, and of that times the ranks of `heads_group`.
        group: process group that the sequence is divided over. Default: the default group.
        heads_group: second process group of `ring_attention`: each rank of it has a contiguous
            part of the shard.
        layout: "zigzag" or "contiguous"; see `SequenceLayout`.

    Returns:
        x with the size of `dim` divided by the number of ranks, contiguous; differentiable.

    Raises:
        TypeError: x is not a tensor.
        ValueError: the size of `dim` is no such multiple, or torch.distributed is not initialized.
    """
    peers, heads, dim = check_shard(x, dim, group, heads_group, layout)
    length = x.shape[dim]
    check_length(f"the size of dimension {dim}", length, layout, peers.size, heads.size)
    pieces = pieces_of(layout, length, peers.rank, peers.size)
    parts = [x.narrow(dim, piece.start, piece.length) for piece in pieces]
    shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    own = shard.shape[dim] // heads.size
    return shard.narrow(dim, heads.rank * own, own).contiguous()


def unshard_sequence(
    x: Tensor,
    *,
    dim: int,
    group: Group = None,
    heads_group: Group = None,
    layout: SequenceLayout = "zigzag",
) -> Tensor:
    """Returns the undivided tensor of the shards of all ranks, on every rank: the inverse of
    `shard_sequence`, with the same arguments.

    The gradient of a shard is summed over the ranks, as that of a loss that is a sum over ranks.

    Raises:
        TypeError: x is not a tensor.
        ValueError: the shard does not consist of chunks, or torch.distributed is not initialized.
    """
    peers, heads, dim = check_shard(x, dim, group, heads_group, layout)
    length = x.shape[dim] * peers.size * heads.size
    check_length(f"the undivided size of dimension {dim}", length, layout, peers.size, heads.size)
    x = x.transpose(0, dim)
    x = all_gather(peers, all_gather(heads, x))
    return in_order(x, 0, layout, peers.size).transpose(0, dim)


def in_order(x: Tensor, dim: int, layout: SequenceLayout, size: int) -> Tensor:
    """Returns the shards of all ranks, concatenated by rank, in the order of the sequence."""
    if layout == "contiguous" or size == 1:
        return x
    return torch.cat([x.narrow(dim, *at) for at in _places(x.shape[dim], size)], dim)


def in_shards(x: Tensor, dim: int, layout: SequenceLayout, size: int) -> Tensor:
    """Returns a sequence as the shards of all ranks, concatenated by rank."""
    if layout == "contiguous" or size == 1:
        return x
    pieces = [p for rank in range(size) for p in pieces_of(layout, x.shape[dim], rank, size)]
    return torch.cat([x.narrow(dim, piece.start, piece.length) for piece in pieces], dim)


def _places(length: int, size: int) -> Sequence[tuple[int, int]]:
    """(offset, length) of the zigzag pieces among concatenated shards, in order."""
    shard = length // size
    placed = [
        (piece.start, rank * shard + piece.offset, piece.length)
        for rank in range(size)
        for piece in pieces_of("zigzag", length, rank, size)
    ]
    return [(offset, count) for _, offset, count in sorted(placed)]


def check_shard(
    x: Tensor,
    dim: int,
    group: Group,
    heads_group: Group = None,
    layout: SequenceLayout = "contiguous",
) -> tuple[Peers, Peers, int]:
    """Returns the processes of both groups, and the dimension counted from the first one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    check_int("dim", dim, -x.dim(), x.dim() - 1)
    check_layout(layout)
    peers = Peers.of(group)
    heads = peers.alone() if heads_group is None else Peers.of(heads_group, "heads_group")
    return peers, heads, dim % x.dim()
