"""The share of a call's arguments that belongs to this rank's heads, over all tokens of the ranks.

Tensors by token are gathered; tensors by head are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..masks.constraints import (
    BlockSparse,
    Constraint,
    Dense,
    Intervals,
    KeyRange,
    Positions,
    Segments,
    Window,
)
from ..masks.mask import Mask
from ..masks.selected import Selected
from ..scores.alibi import Alibi
from ..scores.relative import Relative, RelativeBias
from .arguments import Arguments
from .collectives import all_gather, heads_for_sequence, sequence_for_heads
from .peers import Peers
from .sequence import SequenceLayout, in_order, in_shards


@dataclass(frozen=True)
class HeadShards:
    """Heads rank * H / P to (rank + 1) * H / P - 1, of the tokens of P ranks.

    The tokens come in the order of the sequence if the shards have the layout `layout`.
    """

    peers: Peers
    H_q: int
    H_kv: int
    layout: SequenceLayout = "contiguous"

    def __post_init__(self) -> None:
        size = self.peers.size
        if self.H_q % size or (self.H_kv % size and size % self.H_kv):
            raise ValueError(
                f"heads must divide over the {size} ranks of the group: H_q must be a multiple of "
                f"it, and H_kv a multiple or a divisor, got H_q = {self.H_q}, H_kv = {self.H_kv}"
            )

    @property
    def first(self) -> int:
        """This rank's first query head."""
        return self.peers.rank * (self.H_q // self.peers.size)

    def queries(self, x: Tensor) -> Tensor:
        """(B, H_q, L, ...) -> (B, H_q / P, P L, ...)."""
        return self._ordered(heads_for_sequence(self.peers, x), 2)

    def keys(self, x: Tensor) -> Tensor:
        """(B, H_kv, L, ...) -> (B, H_kv / P, P L, ...); with fewer key heads than ranks, the one
        that this rank's query heads share."""
        if self.H_kv % self.peers.size:
            x = x.repeat_interleave(self.peers.size // self.H_kv, dim=1)
        return self._ordered(heads_for_sequence(self.peers, x), 2)

    def tokens(self, x: Tensor) -> Tensor:
        """The inverse of `queries`."""
        return sequence_for_heads(self.peers, in_shards(x, 2, self.layout, self.peers.size))

    def arguments(self, arguments: Arguments) -> Arguments:
        """Returns the arguments of this rank's heads."""
        mask, sinks = arguments.mask, arguments.sinks
        return replace(
            arguments,
            mask=None if mask is None else Mask(tuple(map(self._constraint, mask.constraints))),
            bias=self._bias(arguments.bias),
            relative=self._relative(arguments.relative),
            sinks=None if sinks is None else self._heads(sinks, 0),
        )

    def _bias(self, bias: Tensor | Alibi | None) -> Tensor | Alibi | None:
        if isinstance(bias, Alibi):
            return replace(bias, slopes=self._heads(bias.slopes, -1))
        if bias is None:
            return None
        return self._by_row(bias[(None,) * (4 - bias.dim())])

    def _relative(self, relative: Relative | None) -> Relative | None:
        if relative is None:
            return None
        if isinstance(relative, RelativeBias):
            return replace(relative, table=self._heads(relative.table, 0))
        table = None if relative.table is None else self._heads(relative.table, 0)
        return replace(relative, keys=self._heads(relative.keys, 0), table=table)

    def _constraint(self, one: Constraint) -> Constraint:
        match one:
            case Window() | KeyRange():
                return one
            case Segments():
                q_ids = self._tokens(one.q_ids)
                k_ids = q_ids if one.k_ids is one.q_ids else self._tokens(one.k_ids)
                return replace(one, q_ids=q_ids, k_ids=k_ids)
            case Positions() | Intervals():
                parts: Any = {name: self._positions(x) for name, x in one.tensors().items()}
                return replace(one, **parts)
            case Dense():
                return Dense(self._by_row(one.attn_mask.view(torch.uint8)).view(torch.bool))
            case BlockSparse():
                return replace(one, blocks=self._heads(one.blocks, 0))
            case Selected():
                x = one.indices
                x = self._tokens(x.mT).mT if x.shape[1] == 1 else self.queries(x)
                return replace(one, indices=x.contiguous())

    def _heads(self, x: Tensor, dim: int) -> Tensor:
        """Cuts a dimension of H_q, and leaves one of size 1."""
        if x.shape[dim] != self.H_q:
            return x
        return x.narrow(dim, self.first, self.H_q // self.peers.size)

    def _positions(self, x: Tensor) -> Tensor:
        x = self._tokens(x)
        return self._heads(x, 1) if x.dim() == 3 else x

    def _tokens(self, x: Tensor) -> Tensor:
        """Gathers the last dimension."""
        dim = x.dim() - 1
        return self._ordered(all_gather(self.peers, x.movedim(dim, 0)).movedim(0, dim), dim)

    def _by_row(self, x: Tensor) -> Tensor:
        """(1|B, 1|H_q, 1|L, 1|N) -> (1|B, 1|H_q / P, 1|P L, 1|N)."""
        if x.shape[2] == 1:
            return self._heads(x, 1)
        if x.shape[1] == 1:
            return self._tokens(x.mT).mT
        return self.queries(x)

    def _ordered(self, x: Tensor, dim: int) -> Tensor:
        return in_order(x, dim, self.layout, self.peers.size)
