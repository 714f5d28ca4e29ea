"""Layers of T5: cached attention, options and invalid sizes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

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
)

IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
PARTS = (4, 1, 1, 3)
B, T, WIDTH, HEADS, HEAD_SIZE = 2, sum(PARTS), 10, 3, 5


def x() -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def new_cache(dtype: torch.dtype = torch.float64) -> KVCache:
    return KVCache(layers=1, batch=B, heads=HEADS, capacity=T + 2, head_size=HEAD_SIZE, dtype=dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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


def test_mask_with_a_cache_raises_value_error() -> None:
    cache = new_cache()
    cache.extend(1)
    layer = T5Attention(WIDTH, HEADS, HEAD_SIZE).double()
    with pytest.raises(ValueError, match="mask must be None with a cache"):
        layer(x()[:, :1], mask=Mask.causal(), cache=cache.layer(0))


@each(
    ("changes", "message"),
    [
        ({"width": 0}, "width must be a whole number of at least 1, got 0"),
        ({"heads": 0}, "heads must be a whole number of at least 1, got 0"),
        ({"head_size": -1}, "head_size must be a whole number of at least 1, got -1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"attn_implementation": "flash"}, "attn_implementation must be one of .* got 'flash'"),
    ],
)
def test_invalid_attention_raises_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        T5Attention(**{"width": 10, "heads": 3, "head_size": 5} | changes)


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
