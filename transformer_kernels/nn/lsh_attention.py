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

Sorting makes a copy of each token for every round. Its gradient sums over the copies, whose places
the inverse permutation tells. So both directions are gathers, and gradients are deterministic.

Source: Reformer: The Efficient Transformer (Kitaev et al., 2020, arXiv:2001.04451), section 2; the
hash is that of Andoni et al., 2015. The ring and the epsilon of the norm are those of the authors'
code (google/trax).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.argument_checks import INTEGERS, check_tensor
from ..dispatch.division import check_undivided
from ..functional.attention import attention
from ..masks.mask import Mask
from .attention import attend
from .options import AttnImplementation, check_positive

_EPS = 1e-6
"""Added to the mean square of a key"""

_MOST_BUCKETS = 64
"""Largest number of buckets of one hash. Above it the default is a product of two hashes, whose
time grows with the square root of the number of buckets."""


def default_buckets(length: int, chunk: int) -> tuple[int, ...]:
    """Factors of the default number of buckets, each even.

    The number is a power of two, and at least twice the number of chunks: two buckets fill a chunk.
    """
    chunks = max(1, -(-length // chunk))
    bits = (2 * chunks - 1).bit_length()
    if 2**bits <= _MOST_BUCKETS:
        return (2**bits,)
    return (2 ** (bits // 2), 2 ** (bits - bits // 2))


def check_buckets(buckets: tuple[int, ...]) -> None:
    """Raises ValueError unless `buckets` are even numbers of at least 2."""
    if not buckets or any(type(each) is not int or each < 2 or each % 2 for each in buckets):
        raise ValueError(f"buckets must be even numbers of at least 2, got {buckets}")


@torch.no_grad()
def hash_buckets(
    x: Tensor,
    *,
    rounds: int,
    buckets: tuple[int, ...],
    generator: torch.Generator | None = None,
) -> Tensor:
    """Bucket of each vector in each of `rounds` independent hashes.

    A hash is argmax [x R; -x R] with a random matrix R of D x buckets / 2. Several factors of
    buckets make one hash out of as many smaller ones: bucket = h_0 + buckets_0 (h_1 + ...).

    Args:
        x: vectors (B, H, T, D); half precision is hashed in float32.
        rounds: number of hashes.
        buckets: number of buckets, as even factors.
        generator: random generator of R, on the CPU; torch's default generator unless given.

    Returns:
        (B, H, rounds, T) int64, at least 0 and below the product of `buckets`.

    Raises:
        ValueError: `rounds` or `buckets` is out of range, or x has another number of dimensions.
    """
    check_positive("rounds", rounds)
    check_buckets(buckets)
    if x.dim() != 4:
        raise ValueError(f"x must be (B, H, T, D), got shape {tuple(x.shape)}")
    _, H, _, D = x.shape
    found = []
    with torch.autocast(x.device.type, enabled=False):
        x = x if x.dtype == torch.float64 else x.float()
        for _ in range(rounds):
            bucket, before = torch.zeros((), dtype=torch.int64, device=x.device), 1
            for size in buckets:
                R = torch.randn(H, D, size // 2, generator=generator, device="cpu")
                y = x @ R.to(x)
                bucket = bucket + before * torch.cat([y, -y], dim=-1).argmax(dim=-1)
                before *= size
            found.append(bucket)
    return torch.stack(found, dim=2)


@torch.no_grad()
def sorted_by_bucket(buckets: Tensor) -> Tensor:
    """Positions sorted by bucket, and within a bucket by position.

    Args:
        buckets: (..., T) integers.

    Returns:
        (..., T) int32: a permutation of 0 to T - 1 in each row.
    """
    return buckets.sort(dim=-1, stable=True).indices.int()


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
