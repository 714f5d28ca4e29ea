"""Attention by hashing: equality with dense attention, padding, derivatives, and hashes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.zoo import IMPLEMENTATIONS, randn, result_and_gradients, saved_sizes
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule
from transformer_kernels.nn import (
    AttnImplementation,
    default_buckets,
    hash_buckets,
    lsh_attention,
    sorted_by_bucket,
)

B, H = 2, 3
SIZES = ((1, 4, 1), (3, 4, 2), (16, 4, 1), (16, 4, 3), (23, 4, 3), (9, 3, 2), (131, 16, 2))
"""Length, chunk and rounds"""

every_size = pytest.mark.parametrize(("T", "m", "rounds"), SIZES)
causal_or_not = pytest.mark.parametrize("causal", [True, False])


def inputs(T: int, dtype: torch.dtype = torch.float64, D: int = 6) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) and v (B, H, T, D - 1), as views of projections."""
    q, v = (randn(B, T, H, size, seed=T + size).to(dtype) for size in (D, D - 1))
    return q.transpose(1, 2).requires_grad_(), v.transpose(1, 2).requires_grad_()


def random_order(T: int, rounds: int) -> Tensor:
    """(B, H, rounds, T): independent permutations."""
    keys = torch.rand(B, H, rounds, T, generator=torch.Generator().manual_seed(7))
    return keys.argsort(dim=-1).int()


def meetings(order: list[list[int]], m: int) -> Tensor:
    """How many times query i meets key j, for one head: (T, T), by walking the ring of chunks."""
    T = len(order[0])
    ring = [row[start : start + m] for row in order for start in range(0, T, m)]
    count = torch.zeros(T, T, dtype=torch.float64)
    for c, queries in enumerate(ring):
        for i in queries:
            for j in ring[c - 1] + queries:
                count[i, j] += 1
    return count


def dense(
    q: Tensor, v: Tensor, order: Tensor, m: int, *, causal: bool, scale: float,
    lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(s + log N) v in plain torch."""
    T, D = q.shape[2:]
    N = torch.stack(
        [torch.stack([meetings(order[b, h].tolist(), m) for h in range(H)]) for b in range(B)]
    )
    i = torch.arange(T)
    N = N * (i[:, None] > i) if causal else N * (i[:, None] != i)
    if lengths is not None:
        N = N * (i < lengths[:, None, None, None])
    itself = torch.eye(T, dtype=torch.float64) * (N.sum(dim=-1, keepdim=True) == 0)
    k = q / (q.square().sum(dim=-1, keepdim=True) + 1e-6 * D).sqrt()
    return (scale * q @ k.mT + (N + itself).log().to(q.dtype)).softmax(dim=-1) @ v


@every_size
@causal_or_not
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_and_gradients_equal_those_of_dense_attention(
    T: int, m: int, rounds: int, causal: bool, implementation: AttnImplementation
) -> None:
    q, v = inputs(T)
    order = random_order(T, rounds)
    o = lsh_attention(q, v, order, chunk=m, causal=causal, attn_implementation=implementation)
    expected = dense(q, v, order, m, causal=causal, scale=6**-0.5)
    found, wanted = result_and_gradients(o, q, v), result_and_gradients(expected, q, v)
    assert_same_function(found, wanted)


@causal_or_not
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_and_scale(causal: bool, implementation: AttnImplementation) -> None:
    q, v = inputs(23)
    order, lengths = random_order(23, 2), torch.tensor([9, 0])
    o = lsh_attention(
        q, v, order,
        chunk=4, causal=causal, scale=1.0, key_lengths=lengths, attn_implementation=implementation,
    )  # fmt: skip
    expected = dense(q, v, order, 4, causal=causal, scale=1.0, lengths=lengths)
    found, wanted = result_and_gradients(o, q, v), result_and_gradients(expected, q, v)
    assert_same_function(found, wanted)
    torch.testing.assert_close(o[1], v[1])


@pytest.mark.usefixtures("poisoned")
@causal_or_not
@pytest.mark.parametrize(("T", "m"), [(64, 16), (75, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_kernels_equal_float64(dtype: torch.dtype, T: int, m: int, causal: bool) -> None:
    """In half precision the results of the rounds are rounded before they merge.

    Uninitialized memory holds NaN.
    """
    low = inputs(T, dtype, D=32)
    order = random_order(T, 3)
    q, v = (x.detach().double().requires_grad_() for x in low)
    found = result_and_gradients(lsh_attention(*low, order, chunk=m, causal=causal), *low)
    exact, plain = (
        result_and_gradients(dense(*x, order, m, causal=causal, scale=32**-0.5), *x)
        for x in ((q, v), low)
    )
    for name, *results in zip(("o", "dq", "dv"), found, exact, plain, strict=True):
        assert results[0].dtype == dtype
        assert_within_rule(name, *results)


@pytest.mark.parametrize("nan_key", [0, 5, 17, 22])
def test_only_queries_that_meet_a_nan_key_become_nan(nan_key: int) -> None:
    q, v = (x.detach() for x in inputs(23))
    order = random_order(23, 2)
    clean = lsh_attention(q, v, order, chunk=4)
    q[:, :, nan_key] = float("nan")
    o = lsh_attention(q, v, order, chunk=4)
    i = torch.arange(23)
    for b in range(B):
        for h in range(H):
            meets = meetings(order[b, h].tolist(), 4)[:, nan_key] > 0
            sees = meets & (i > nan_key)
            rest = ~sees & (i != nan_key)
            assert o[b, h, sees].isnan().all()
            assert_same_function(o[b, h, rest], clean[b, h, rest])


@pytest.mark.parametrize("causal", [True, False])
def test_padding_may_hold_nan(causal: bool) -> None:
    """As values and as keys. Padding as queries has results of its own, which nobody reads."""
    lengths = torch.tensor([9, 14])
    is_padding = (torch.arange(23) >= lengths[:, None])[:, None, :, None]
    order = random_order(23, 2)
    results = []
    for value in (0.0, float("nan")):
        q, v = inputs(23)
        v = v.detach().masked_fill(is_padding, value).requires_grad_()
        o = lsh_attention(q, v, order, chunk=4, causal=causal, key_lengths=lengths)
        o = o.masked_fill(is_padding, 0.0)
        results.append([x.masked_fill(is_padding, 0.0) for x in result_and_gradients(o, q, v)])
    for clean, poisoned in zip(*results, strict=True):
        assert_same_function(poisoned, clean)


def test_a_zero_vector_has_finite_gradients() -> None:
    q, v = inputs(9)
    q = q.detach().index_fill(2, torch.tensor([0, 4]), 0.0).requires_grad_()
    order = random_order(9, 2)
    found = result_and_gradients(lsh_attention(q, v, order, chunk=3), q, v)
    wanted = result_and_gradients(dense(q, v, order, 3, causal=True, scale=6**-0.5), q, v)
    assert_same_function(found, wanted)


@each(("T", "m", "rounds"), SIZES[:-1])
def test_derivatives_of_first_and_second_order(T: int, m: int, rounds: int) -> None:
    q, v = (x[:1, :, :, :3].detach().requires_grad_() for x in inputs(T))
    order = random_order(T, rounds)[:1]

    def f(q: Tensor, v: Tensor) -> Tensor:
        return lsh_attention(q, v, order, chunk=m)

    assert torch.autograd.gradcheck(f, (q, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (q, v), fast_mode=True)


def test_empty_texts_have_empty_results_and_gradients() -> None:
    q, v = inputs(0)
    o = lsh_attention(q, v, random_order(0, 2), chunk=4)
    assert o.shape == (B, H, 0, 5)
    assert [x.shape for x in torch.autograd.grad(o.sum(), (q, v))] == [q.shape, v.shape]


def test_memory_is_linear_in_the_length() -> None:
    """No tensor that autograd saves is larger than the copies of k: two of each round."""
    q, v = inputs(400)
    sizes = saved_sizes(lambda: lsh_attention(q, v, random_order(400, 2), chunk=16))
    assert 0 < max(sizes) <= 4 * q.numel() < B * H * 400 * 400


def test_gradients_have_the_same_bits_at_every_call() -> None:
    q, v = inputs(131, torch.float32)
    order = random_order(131, 3)
    results = [result_and_gradients(lsh_attention(q, v, order, chunk=16), q, v) for _ in range(3)]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@each(
    ("changes", "error", "message"),
    [
        ({"v": torch.zeros(B, H, 8, 5)}, ValueError, "q and v must be .* got shapes"),
        ({"order": torch.zeros(B, H, 9)}, TypeError, "order must be a tensor of integers"),
        (
            {"order": random_order(9, 2)[:, :2]},
            ValueError,
            r"order must be \(2, 3, rounds, 9\) with at least one round, got shape \(2, 2, 2, 9\)",
        ),
        ({"order": random_order(9, 2)[:, :, :0]}, ValueError, "at least one round"),
        (
            {"order": random_order(9, 2) + 1},
            ValueError,
            "order must have positions from 0 to 8, got 9",
        ),
        (
            {"order": random_order(9, 2).clamp(min=1)},
            ValueError,
            "order must have every position once in each row",
        ),
        ({"chunk": 0}, ValueError, "chunk must be a whole number of at least 1, got 0"),
        ({"key_lengths": torch.zeros(3)}, TypeError, "key_lengths must be a tensor of integers"),
        ({"key_lengths": torch.zeros(3).int()}, ValueError, r"key_lengths must be \(2,\)"),
        ({"attn_implementation": "naive"}, ValueError, "attn_implementation must be one of"),
    ],
)
def test_invalid_arguments_raise(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, v = inputs(9)
    arguments: dict[str, Any] = {"q": q, "v": v, "order": random_order(9, 2), "chunk": 4}
    with pytest.raises(error, match=message):
        lsh_attention(**arguments | changes)


def test_compiled_attention_is_one_graph_with_the_same_results() -> None:
    q, v = inputs(23)
    order = random_order(23, 2)

    def f(q: Tensor, v: Tensor) -> Tensor:
        return lsh_attention(q, v, order, chunk=4)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    found, wanted = (result_and_gradients(each(q, v), q, v) for each in (compiled, f))
    assert_same_function(found, wanted)


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


@each(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"buckets": (7,)}, r"buckets must be even numbers of at least 2, got \(7,\)"),
        ({"buckets": (4, 0)}, r"buckets must be even numbers of at least 2, got \(4, 0\)"),
        ({"buckets": ()}, r"buckets must be even numbers of at least 2, got \(\)"),
    ],
)
def test_invalid_options_of_hashes_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hashed(vectors(4), **options)
    with pytest.raises(ValueError, match=r"x must be \(B, H, T, D\), got shape \(3, 4, 16\)"):
        hashed(vectors(4)[0])
