"""Locality-sensitive hashing of vectors: nearby directions tend to share a bucket.

Source: Reformer: The Efficient Transformer (Kitaev et al., 2020, arXiv:2001.04451), section 2; the
scheme is that of Andoni et al., 2015.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .options import check_positive

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
