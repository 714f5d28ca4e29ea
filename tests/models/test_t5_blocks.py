"""Layers of T5: buckets of distances and their bias, cached attention, invalid sizes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.support.buckets import bucket_by_integers
from tests.support.tiers import each
from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    AttnImplementation,
    BucketedBias,
    KVCache,
    T5Attention,
    T5Block,
    T5FeedForward,
    distance_buckets,
)

CONFIGS = [(32, 128), (10, 12), (4, 3), (31, 100), (64, 1000), (33, 17)]
"""Buckets and max_distance; the first are T5's."""

BOTH = pytest.mark.parametrize("bidirectional", [True, False])
SIZES = pytest.mark.parametrize(("buckets", "max_distance"), CONFIGS)


def buckets_of(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    return distance_buckets(
        distance, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional
    )


@BOTH
@SIZES
def test_buckets_match_integer_arithmetic(
    buckets: int, max_distance: int, bidirectional: bool
) -> None:
    distance = torch.arange(-300, 301)
    expected = [
        bucket_by_integers(d, buckets, max_distance, bidirectional=bidirectional)
        for d in range(-300, 301)
    ]
    assert buckets_of(distance, buckets, max_distance, bidirectional).tolist() == expected


@BOTH
@SIZES
def test_table_of_distances_is_exact_for_longer_texts(
    buckets: int, max_distance: int, bidirectional: bool
) -> None:
    """Beyond max_distance every distance has the bucket of max_distance, up to 5000."""
    distance = torch.arange(-5000, 5001)
    expected = buckets_of(distance, buckets, max_distance, bidirectional)
    layer = BucketedBias(3, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    relative = layer()
    assert relative.table.shape == (3, (2 if bidirectional else 1) * max_distance + 1)
    table = relative.by_distance(5001, 5001, torch.float32)
    assert torch.equal(table, layer.table[expected].T)


@pytest.mark.parametrize(("M", "N"), [(9, 9), (4, 9), (9, 4)])
@BOTH
def test_bias_of_a_pair_is_that_of_its_distance(bidirectional: bool, M: int, N: int) -> None:
    """Query i is at position i + N - M; its table has gradients by the use of each bucket."""
    layer = BucketedBias(2, buckets=6, max_distance=5, bidirectional=bidirectional)
    bias = layer().dense(M, N)
    used = torch.zeros(6, 2)
    for i in range(M):
        for j in range(N):
            bucket = bucket_by_integers(i + N - M - j, 6, 5, bidirectional=bidirectional)
            assert torch.equal(bias[0, :, i, j], layer.table[bucket])
            used[bucket] += 1
    bias.sum().backward()
    assert layer.table.grad is not None
    torch.testing.assert_close(layer.table.grad, used)


def test_buckets_are_known_on_every_device_and_not_saved() -> None:
    with torch.device("meta"):
        layer = BucketedBias(2, bidirectional=True)
    assert layer.bucket.device.type == "cpu"
    assert list(layer.state_dict()) == ["table"]
    assert BucketedBias(2, bidirectional=True).to("meta")().table.device.type == "meta"


@pytest.mark.exhaustive
@BOTH
def test_buckets_match_transformers(bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="needs transformers")
    distance = torch.arange(-6000, 6001)
    for buckets, max_distance in [*CONFIGS, (16, 64), (32, 500), (64, 128), (128, 2048), (8, 9)]:
        expected = t5.T5Attention._relative_position_bucket(
            -distance, bidirectional=bidirectional, num_buckets=buckets, max_distance=max_distance
        )
        assert torch.equal(buckets_of(distance, buckets, max_distance, bidirectional), expected)


@each(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads must be a whole number of at least 1, got 0"),
        ({"buckets": 3}, "buckets must be at least 4 for a bidirectional bias, got 3"),
        (
            {"buckets": 1, "bidirectional": False},
            "buckets must be at least 2 for a unidirectional bias, got 1",
        ),
        ({"max_distance": 8}, "max_distance must be above 8, .* among 32 buckets, got 8"),
        (
            {"max_distance": 16, "bidirectional": False},
            "max_distance must be above 16, .* among 32 buckets, got 16",
        ),
        ({"max_distance": -2}, "max_distance must be a whole number of at least 1, got -2"),
    ],
)
def test_invalid_sizes_raise_value_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketedBias(**{"heads": 2, "bidirectional": True} | arguments)


PARTS = (4, 1, 1, 3)
B, T, WIDTH, HEADS, HEAD_SIZE = 2, sum(PARTS), 10, 3, 5


def x() -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def new_cache(dtype: torch.dtype = torch.float64) -> KVCache:
    return KVCache(layers=1, batch=B, heads=HEADS, capacity=T + 2, head_size=HEAD_SIZE, dtype=dtype)


@pytest.mark.parametrize("implementation", get_args(AttnImplementation))
def test_incremental_attention_matches_one_call(implementation: AttnImplementation) -> None:
    torch.manual_seed(0)
    layer = T5Attention(WIDTH, HEADS, HEAD_SIZE, attn_implementation=implementation).double()
    positions = BucketedBias(HEADS, buckets=5, max_distance=4, bidirectional=False).double()
    cache = new_cache()
    parts = []
    for part in x().split(PARTS, dim=1):
        cache.extend(part.shape[1])
        parts.append(layer(part, relative=positions(), cache=cache.layer(0)))
    whole = layer(x(), mask=Mask.causal(), relative=positions())
    assert_same_function(torch.cat(parts, dim=1), whole)
    assert not torch.allclose(whole, layer(x(), mask=Mask.causal()))


@pytest.mark.parametrize("implementation", get_args(AttnImplementation))
def test_autocast_is_close_to_float32(implementation: AttnImplementation) -> None:
    torch.manual_seed(0)
    block = T5Block(WIDTH, HEADS, HEAD_SIZE, hidden=14, attn_implementation=implementation)
    positions = BucketedBias(HEADS, bidirectional=False)
    whole = block(x().float(), mask=Mask.causal(), relative=positions())
    cache = new_cache(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = block(x().float(), mask=Mask.causal(), relative=positions())
        cast.sum().backward()
        cache.extend(T)
        cached = block(x().float(), relative=positions(), cache=cache.layer(0))
    for y in (cast, cached):
        assert_same_function(y, whole, dtype=torch.bfloat16)
    assert positions.table.grad is not None
    assert positions.table.grad.any()


def test_dropout_of_the_feed_forward_network_is_between_its_projections() -> None:
    torch.manual_seed(0)
    layer = T5FeedForward(WIDTH, 1000, activation="gated_gelu", dropout=0.5).double()
    inner: list[Tensor] = []
    layer.down_proj.register_forward_pre_hook(lambda _, inputs: inner.append(inputs[0]))
    layer(x())
    layer.eval()(x())
    assert 0.45 < (inner[0] == 0).double().mean() < 0.55
    assert inner[1].all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"activation": "gelu"}, "activation must be one of 'relu', 'gated_gelu', got 'gelu'"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1, got -0.1"),
    ],
)
def test_invalid_feed_forward_raises_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        T5FeedForward(**{"width": 10, "hidden": 14} | changes)
