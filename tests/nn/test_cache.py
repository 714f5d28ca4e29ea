"""Key/value cache: incremental calls give the same result as one call on the whole text."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from transformer_kernels import Mask, relative_bias
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    AttnImplementation,
    DecoderBlock,
    KVCache,
    MultiHeadAttention,
    Scaling,
    Stack,
    TransformerBlock,
    attend,
)

IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
PARTS = (4, 1, 1, 3, 1)
B, T, WIDTH, HEADS = 3, sum(PARTS), 12, 2


def x() -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def cache(layers: int = 1, capacity: int = T + 2, *, head_size: int = 6) -> KVCache:
    return KVCache(
        layers=layers,
        batch=B,
        heads=HEADS,
        capacity=capacity,
        head_size=head_size,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("scaling", get_args(Scaling))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_incremental_attention_matches_one_call(
    implementation: AttnImplementation, scaling: Scaling
) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(
        WIDTH, HEADS, bias=True, scaling=scaling, attn_implementation=implementation
    ).double()
    kv_cache, start = cache(), 0
    parts = []
    for count in PARTS:
        assert kv_cache.extend(count) == start
        parts.append(layer(x()[:, start : start + count], cache=kv_cache.layer(0)))
        start += count
    assert kv_cache.length == T
    assert_same_function(torch.cat(parts, dim=1), layer(x(), mask=Mask.causal()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_incremental_attention_has_the_bias_of_absolute_distances(
    implementation: AttnImplementation,
) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(B, HEADS, T, 6, generator=generator).double() for _ in range(3))
    table = torch.randn(HEADS, 5, generator=generator).double()
    relative = relative_bias(table, lowest=1, align="bottom_right")
    kv_cache, start = cache(), 0
    parts = []
    for count in PARTS:
        kv_cache.extend(count)
        new = slice(start, start + count)
        o = kv_cache.layer(0).attend(
            q[:, :, new], k[:, :, new], v[:, :, new],
            scale=1.0, relative=relative, attn_implementation=implementation,
        )  # fmt: skip
        parts.append(o)
        start += count
    whole = attend(q, k, v, mask=Mask.causal(), relative=relative, scale=1.0)
    assert_same_function(torch.cat(parts, dim=2), whole)
    assert not torch.allclose(whole, attend(q, k, v, mask=Mask.causal(), scale=1.0))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_incremental_stack_matches_one_call(implementation: AttnImplementation) -> None:
    torch.manual_seed(0)
    stack = Stack(
        TransformerBlock(WIDTH, HEADS, attn_implementation=implementation) for _ in range(3)
    ).double()
    kv_cache = cache(layers=3)
    parts = []
    for part in x().split(PARTS, dim=1):
        kv_cache.extend(part.shape[1])
        parts.append(stack(part, cache=kv_cache))
    assert_same_function(torch.cat(parts, dim=1), stack(x(), mask=Mask.causal()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_incremental_decoder_matches_one_call(implementation: AttnImplementation) -> None:
    """The memory has padding, and its keys and values are computed once."""
    torch.manual_seed(0)
    block = DecoderBlock(WIDTH, HEADS, norm="pre", attn_implementation=implementation).double()
    memory = block.memory_attention.keys_and_values(torch.randn(B, 7, WIDTH).double())
    padding = Mask.padding(torch.tensor([7, 3, 1]))
    kv_cache = cache()
    parts = []
    for part in x().split(PARTS, dim=1):
        kv_cache.extend(part.shape[1])
        parts.append(block(part, memory, memory_mask=padding, cache=kv_cache.layer(0)))
    whole = block(x(), memory, mask=Mask.causal(), memory_mask=padding)
    assert_same_function(torch.cat(parts, dim=1), whole)


def test_extending_beyond_the_capacity_raises_and_changes_nothing() -> None:
    kv_cache = cache(capacity=5)
    kv_cache.extend(4)
    with pytest.raises(
        ValueError,
        match=r"count must be at most 1, the free positions .* capacity 5 and length 4, got 2",
    ):
        kv_cache.extend(2)
    assert kv_cache.length == 4
    assert kv_cache.cache_seqlens.tolist() == [4] * B


def test_mask_with_a_cache_raises_value_error() -> None:
    kv_cache = cache()
    kv_cache.extend(1)
    layer = MultiHeadAttention(WIDTH, HEADS).double()
    with pytest.raises(ValueError, match="mask must be None with a cache"):
        layer(x()[:, :1], mask=Mask.causal(), cache=kv_cache.layer(0))


def test_invalid_capacity_raises_value_error() -> None:
    with pytest.raises(ValueError, match="capacity must be a whole number of at least 1, got 0"):
        cache(capacity=0)


def test_half_precision_cache_keeps_its_dtype() -> None:
    layer = MultiHeadAttention(WIDTH, HEADS).bfloat16()
    kv_cache = KVCache(
        layers=1, batch=B, heads=HEADS, capacity=4, head_size=6, dtype=torch.bfloat16
    )
    kv_cache.extend(1)
    y = layer(x()[:, :1].bfloat16(), cache=kv_cache.layer(0))
    assert y.dtype == torch.bfloat16
    assert isinstance(layer.keys, nn.Linear)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_may_be_narrower_than_the_cache(implementation: AttnImplementation) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(WIDTH, HEADS, attn_implementation=implementation)
    kv_cache = KVCache(layers=1, batch=B, heads=HEADS, capacity=T, head_size=6)
    parts = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for part in x().float().split(PARTS, dim=1):
            kv_cache.extend(part.shape[1])
            parts.append(layer(part, cache=kv_cache.layer(0)))
    whole = layer(x().float(), mask=Mask.causal())
    assert_same_function(torch.cat(parts, dim=1), whole, dtype=torch.bfloat16)
