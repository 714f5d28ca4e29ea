"""Tokens sorted by hash and cut into chunks, and their way back.

Sorting makes a copy of each token for every round. Its gradient sums over the copies, whose places
the inverse permutation tells. So both directions are gathers, and gradients are deterministic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .options import check_positive


class SortedChunks:
    """Chunks of tokens in a given order, for each batch entry, head and round.

    G = B * H groups have C = rounds * ceil(T / chunk) chunks each, which form a ring: before the
    first chunk of a round stands the last one of the round before. The last chunk of each round is
    padded with zeros.
    """

    def __init__(self, order: Tensor, chunk: int) -> None:
        """Computes the places of all tokens.

        Args:
            order: (B, H, rounds, T) integers; each row is a permutation of 0 to T - 1.
            chunk: number of tokens of a chunk, m below.

        Raises:
            ValueError: `chunk` is not positive, or a row is no permutation. The rows are checked on
                the CPU only, and not under torch.compile.
        """
        check_positive("chunk", chunk)
        self.order = order = order.long()
        self.chunk = chunk
        B, H, rounds, T = order.shape
        device = order.device
        per_round = -(-T // chunk)
        self._per_round = per_round
        self._padding = per_round * chunk - T
        self._shape = (B * H, rounds * per_round, chunk)
        b, h, r = (
            torch.arange(size, device=device).view(-1, *(1,) * (3 - dim))
            for dim, size in enumerate((B, H, rounds))
        )
        # Tokens in the order (b, t, h), in which heads split from one projection need no copy.
        token = (b * T + order) * H + h
        place = torch.arange(T, device=device)
        place = ((b * H + h) * rounds + r) * (T + self._padding) + place
        places = torch.full((B * T * H * rounds,), -1, device=device)
        values_are_checked = device.type == "cpu" and not torch.compiler.is_compiling()
        if values_are_checked:
            self._check_range()
        places[(token * rounds + r).flatten()] = place.flatten()
        if values_are_checked and bool((places < 0).any()):
            raise ValueError("order must have every position once in each row")
        places = places.view(-1, rounds)
        tokens = self._padded(token, B * T * H).view(self._shape)
        self._own = _Gather(tokens, places, self._padding > 0, pairs=False)
        self._pairs = self._own._replace(places=self._places_in_pairs(places), pairs=True)

    def _check_range(self) -> None:
        T = self.order.shape[3]
        if self.order.numel():
            least, most = (int(x) for x in self.order.aminmax())
            if least < 0 or most >= T:
                wrong = least if least < 0 else most
                raise ValueError(f"order must have positions from 0 to {T - 1}, got {wrong}")

    def _padded(self, x: Tensor, value: int) -> Tensor:
        """(B, H, rounds, T) -> (B, H, rounds, chunks of a round * m)."""
        return nn.functional.pad(x, (0, self._padding), value=value)

    def _places_in_pairs(self, places: Tensor) -> Tensor:
        """Places when each chunk is behind the one before it: (n, 2 * rounds).

        Place (g, c, i) becomes (g, c, m + i) and, in the next chunk of the ring, (g, c + 1, i).
        """
        _, C, m = self._shape
        group, chunk, i = places // (C * m), places // m % C, places % m
        own, next_one = ((group * C + c) * 2 * m + i for c in (chunk, (chunk + 1) % C))
        return torch.cat([own + m, next_one], dim=1)

    def sort(self, x: Tensor) -> Tensor:
        """x (B, H, T, D) -> the chunks (G, C, m, D)."""
        return _gathered(_rows(x), self._own)

    def sort_pairs(self, x: Tensor) -> Tensor:
        """x (B, H, T, D) -> each chunk behind the one before it: (G, C, 2 m, D), a view in which
        neighbours overlap."""
        return _gathered(_rows(x), self._pairs)

    def sum_rounds(self, x: Tensor) -> Tensor:
        """Chunks x (G, C, m, D) -> the sum of each token's copies: (B, H, T, D)."""
        B, H, _, T = self.order.shape
        y = _gathered(x, self._own, transposed=True)
        return y.view(B, T, H, -1).transpose(1, 2)

    def softmax_over_rounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax over the copies of each token.

        Args:
            x: (G, C, m), a logit for each copy.

        Returns:
            the softmax (G, C, m), and where all logits are -inf: (B, H, T) bool. There the softmax
            is uniform.
        """
        B, H, _, T = self.order.shape
        copies = x.flatten()[self._own.places]
        none = copies.detach().isneginf().all(dim=1)
        weights = copies.masked_fill(none[:, None], 0.0).softmax(dim=1)
        sorted_weights = torch.zeros_like(x).flatten()
        sorted_weights[self._own.places] = weights
        return sorted_weights.view_as(x), none.view(B, T, H).transpose(1, 2)

    def positions(self, key_lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Positions of the tokens of each chunk, as queries and as keys.

        Args:
            key_lengths: integers (B,); keys at and after the length are padding.

        Returns:
            q_pos (G, C, m), 0 for padding, and k_pos (G, C, 2 m), T for padding.
        """
        T = self.order.shape[3]
        keys = self.order
        if key_lengths is not None:
            keys = keys.where(keys < key_lengths[:, None, None, None], T)
        q_pos, k_pos = self._padded(self.order, 0), self._padded(keys, T)
        return q_pos.view(self._shape), _pairs(k_pos.view(self._shape))

    def meetings(self) -> Tensor:
        """How many times key j is in the chunk of query i or in the one before: (B, H, T, T) int64.

        The definition of the visible keys, before causality and padding.
        """
        B, H, rounds, T = self.order.shape
        ring = rounds * self._per_round
        rank = self.order.argsort(dim=-1)
        first = torch.arange(rounds, device=rank.device)[:, None] * self._per_round
        chunk = first + rank // self.chunk
        count = torch.zeros(B, H, T, T, dtype=torch.int64, device=rank.device)
        for query in chunk.unbind(dim=2):
            for key in chunk.unbind(dim=2):
                distance = (query[..., None] - key[..., None, :]) % ring
                count += (distance == 0).int() + (distance == 1 % ring)
        return count


def _rows(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B * T * H, D), a view if the heads are split from one projection."""
    return x.transpose(1, 2).flatten(0, 2)


def _pairs(chunks: Tensor) -> Tensor:
    """Each chunk behind the one before it: (G, C, m, ...) -> (G, C, 2 m, ...), a view of C + 1."""
    return _pairs_of_ring(torch.cat([chunks[:, -1:], chunks], dim=1))


def _pairs_of_ring(ring: Tensor) -> Tensor:
    m = ring.shape[2]
    pairs: Tensor = ring.flatten(1, 2).unfold(1, 2 * m, m)
    return pairs.movedim(-1, 2)


class _Gather(NamedTuple):
    """The linear map from n tokens to their copies in chunks."""

    tokens: Tensor
    """(G, C, m) int64: the token of each place; n for padding"""
    places: Tensor
    """(n, copies) int64: the places of each token's copies in the result"""
    has_padding: bool
    """True if n is in `tokens`"""
    pairs: bool
    """True if the result has each chunk behind the one before it"""

    def take(self, rows: Tensor) -> Tensor:
        """rows (n, D) -> (G, C, m, D), or (G, C, 2 m, D) for pairs."""
        if self.has_padding:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        tokens = self.tokens
        if self.pairs:
            tokens = torch.cat([tokens[:, -1:], tokens], dim=1)
        taken = rows.index_select(0, tokens.flatten()).view(*tokens.shape, rows.shape[1])
        return _pairs_of_ring(taken) if self.pairs else taken

    def sum(self, copies: Tensor) -> Tensor:
        """The transpose of `take`: (G, C, m, D), or (G, C, 2 m, D) for pairs -> (n, D)."""
        rows = copies.reshape(-1, copies.shape[-1])
        if self.places.shape[1] == 1:
            return rows.index_select(0, self.places[:, 0])
        return nn.functional.embedding_bag(self.places, rows, mode="sum")


class _Gathered(torch.autograd.Function):
    """`_Gather.take` or its transpose `_Gather.sum`: each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: _Gather, transposed: bool) -> Tensor:
        ctx.gather, ctx.transposed = gather, transposed
        return gather.sum(x) if transposed else gather.take(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, ctx.gather, transposed=not ctx.transposed), None, None


def _gathered(x: Tensor, gather: _Gather, *, transposed: bool = False) -> Tensor:
    y: Tensor = _Gathered.apply(x, gather, transposed)  # type: ignore[no-untyped-call]
    return y
