"""Hashing: the formula, near vectors, factors, rounds, dtypes, sorting, errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.tiers import each
from transformer_kernels.nn import default_buckets, hash_buckets, sorted_by_bucket


def vectors(T: int, D: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal vectors (2, 3, T, D)."""
    return torch.randn(2, 3, T, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def hashed(x: Tensor, *, rounds: int = 2, buckets: tuple[int, ...] = (8,), seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return hash_buckets(x, rounds=rounds, buckets=buckets, generator=generator)


@pytest.mark.parametrize("buckets", [(2,), (8,), (4, 6), (2, 4, 2)], ids=str)
def test_bucket_is_the_nearest_of_random_directions_and_their_opposites(
    buckets: tuple[int, ...],
) -> None:
    x = vectors(11)
    found = hashed(x, rounds=3, buckets=buckets)
    assert found.shape == (2, 3, 3, 11)
    generator = torch.Generator().manual_seed(0)
    for r in range(3):
        expected = torch.zeros(2, 3, 11, dtype=torch.int64)
        for n, size in enumerate(buckets):
            R = torch.randn(3, 16, size // 2, generator=generator)
            directions = torch.cat([R, -R], dim=2)
            nearest = torch.einsum("bhtd,hdr->bhtr", x, directions).argmax(dim=3)
            expected += math.prod(buckets[:n]) * nearest
        assert torch.equal(found[:, :, r], expected)


def test_near_vectors_share_a_bucket_more_often_than_far_ones() -> None:
    x = vectors(2000)
    same = {}
    for distance in (0.1, 0.5, 2.0):
        near = x + distance * torch.randn_like(x)
        same[distance] = (hashed(x) == hashed(near)).double().mean().item()
    assert same[0.1] > 0.85
    assert 0.4 < same[0.5] < same[0.1] - 0.1
    assert 0.125 < same[2.0] < same[0.5] - 0.1


def test_length_of_a_vector_does_not_matter_and_its_opposite_has_another_bucket() -> None:
    x = vectors(50)
    assert torch.equal(hashed(x), hashed(3.0 * x))
    assert (hashed(x) != hashed(-x)).all()


def test_more_rounds_begin_with_the_same_hashes() -> None:
    x = vectors(30)
    assert torch.equal(hashed(x, rounds=5)[:, :, :2], hashed(x, rounds=2))
    assert not torch.equal(hashed(x)[:, :, 0], hashed(x)[:, :, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_hashed_in_float32_also_under_autocast(dtype: torch.dtype) -> None:
    x = vectors(500, dtype=dtype)
    expected = hashed(x.float())
    assert torch.equal(hashed(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(hashed(x), expected)


def test_random_numbers_come_from_the_default_generator_unless_one_is_given() -> None:
    x = vectors(40)
    state = torch.get_rng_state()
    first = hash_buckets(x, rounds=2, buckets=(8,))
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(hash_buckets(x, rounds=2, buckets=(8,)), first)
    state = torch.get_rng_state()
    assert torch.equal(hashed(x), hashed(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_positions_are_sorted_by_bucket_and_then_by_position() -> None:
    buckets = hashed(vectors(200), rounds=3)
    order = sorted_by_bucket(buckets)
    assert order.dtype == torch.int32
    keys = (buckets * 200 + torch.arange(200)).gather(-1, order.long())
    assert (keys.diff(dim=-1) > 0).all()


@each(
    ("length", "chunk", "expected"),
    [
        (0, 4, (2,)),
        (3, 4, (2,)),
        (8, 4, (4,)),
        (9, 4, (8,)),
        (64, 16, (8,)),
        (2048, 64, (64,)),
        (2049, 64, (8, 16)),
        (65_536, 64, (32, 64)),
    ],
)
def test_default_buckets_are_even_powers_of_two(
    length: int, chunk: int, expected: tuple[int, ...]
) -> None:
    """At least twice as many as chunks, and at most four times."""
    assert default_buckets(length, chunk) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"buckets": (7,)}, r"buckets must be even numbers of at least 2, got \(7,\)"),
        ({"buckets": (4, 0)}, r"buckets must be even numbers of at least 2, got \(4, 0\)"),
        ({"buckets": ()}, r"buckets must be even numbers of at least 2, got \(\)"),
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hashed(vectors(4), **options)  # type: ignore[arg-type]


def test_other_numbers_of_dimensions_raise_value_error() -> None:
    with pytest.raises(ValueError, match=r"x must be \(B, H, T, D\), got shape \(3, 4, 16\)"):
        hashed(vectors(4)[0])
