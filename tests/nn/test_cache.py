"""Layers that keep keys and values: part by part they give what they give at once."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from transformer_kernels import Mask
from transformer_kernels.nn import (
    AttnImplementation,
    DecoderBlock,
    KeyValueCache,
    MultiHeadAttention,
    Scaling,
    Stack,
    TransformerBlock,
)

PATHS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
PARTS = (4, 1, 1, 3, 1)
B, T, WIDTH, HEADS = 3, sum(PARTS), 12, 2


def x() -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def cache(layers: int = 1, room: int = T + 2, *, head_size: int = 6) -> KeyValueCache:
    return KeyValueCache(
        layers=layers, batch=B, heads=HEADS, room=room, head_size=head_size, dtype=torch.float64
    )


@pytest.mark.parametrize("scaling", get_args(Scaling))
@pytest.mark.parametrize("path", PATHS)
def test_attention_part_by_part(path: AttnImplementation, scaling: Scaling) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(
        WIDTH, HEADS, bias=True, scaling=scaling, attn_implementation=path
    ).double()
    kept, given = cache(), 0
    parts = []
    for count in PARTS:
        assert kept.extend(count) == given
        parts.append(layer(x()[:, given : given + count], cache=kept.layer(0)))
        given += count
    assert kept.written == T
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x(), mask=Mask.causal()))


@pytest.mark.parametrize("path", PATHS)
def test_a_stack_part_by_part(path: AttnImplementation) -> None:
    torch.manual_seed(0)
    stack = Stack(
        TransformerBlock(WIDTH, HEADS, attn_implementation=path) for _ in range(3)
    ).double()
    kept = cache(layers=3)
    parts = []
    for part in x().split(PARTS, dim=1):
        kept.extend(part.shape[1])
        parts.append(stack(part, cache=kept))
    torch.testing.assert_close(torch.cat(parts, dim=1), stack(x(), mask=Mask.causal()))


@pytest.mark.parametrize("path", PATHS)
def test_a_decoder_part_by_part(path: AttnImplementation) -> None:
    """The memory's keys and values are computed once; some of it is padding."""
    torch.manual_seed(0)
    block = DecoderBlock(WIDTH, HEADS, norm="pre", attn_implementation=path).double()
    memory = block.memory_attention.keys_and_values(torch.randn(B, 7, WIDTH).double())
    padding = Mask.padding(torch.tensor([7, 3, 1]))
    kept = cache()
    parts = []
    for part in x().split(PARTS, dim=1):
        kept.extend(part.shape[1])
        parts.append(block(part, memory, memory_mask=padding, cache=kept.layer(0)))
    whole = block(x(), memory, mask=Mask.causal(), memory_mask=padding)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_a_full_cache_says_so_and_stays_as_it_is() -> None:
    kept = cache(room=5)
    kept.extend(4)
    with pytest.raises(ValueError, match="room for 5 positions, 4 of them in use, and 2 are to"):
        kept.extend(2)
    assert kept.written == 4
    assert kept.lengths.tolist() == [4] * B


def test_a_mask_beside_a_cache_is_refused() -> None:
    kept = cache()
    kept.extend(1)
    layer = MultiHeadAttention(WIDTH, HEADS).double()
    with pytest.raises(ValueError, match="mask must be None with a cache"):
        layer(x()[:, :1], mask=Mask.causal(), cache=kept.layer(0))


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="room must be a whole number of at least 1, got 0"):
        cache(room=0)


def test_half_precision_keeps_its_dtype() -> None:
    layer = MultiHeadAttention(WIDTH, HEADS).bfloat16()
    kept = KeyValueCache(layers=1, batch=B, heads=HEADS, room=4, head_size=6, dtype=torch.bfloat16)
    kept.extend(1)
    y = layer(x()[:, :1].bfloat16(), cache=kept.layer(0))
    assert y.dtype == torch.bfloat16
    assert isinstance(layer.keys, nn.Linear)


@pytest.mark.parametrize("path", PATHS)
def test_autocast_may_be_narrower_than_the_cache(path: AttnImplementation) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(WIDTH, HEADS, attn_implementation=path)
    kept = KeyValueCache(layers=1, batch=B, heads=HEADS, room=T, head_size=6)
    parts = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for part in x().float().split(PARTS, dim=1):
            kept.extend(part.shape[1])
            parts.append(layer(part, cache=kept.layer(0)))
    whole = layer(x().float(), mask=Mask.causal())
    torch.testing.assert_close(torch.cat(parts, dim=1).float(), whole, rtol=0, atol=0.03)
