"""Transformer and decoder blocks with both norm orders, feed-forward and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    DecoderBlock,
    FeedForward,
    Norm,
    SelfAttentionBlock,
    Stack,
    TransformerBlock,
    recompute_blocks,
)


def x(T: int = 5, width: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, T, width, generator=generator, dtype=torch.float64)


def perturb(block: nn.Module) -> None:
    """Adds noise to all parameters, so that swapped weights or biases change the result."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


class Scaled(nn.Module):
    """An attention layer with an option of its own."""

    def forward(self, x: Tensor, *, by: float) -> Tensor:
        return x * by


def in_sequence(order: Norm, x: Tensor, *layers: tuple[nn.Module, Callable[..., Tensor]]) -> Tensor:
    for norm, layer in layers:
        x = x + layer(norm(x)) if order == "pre" else norm(x + layer(x))
    return x


@pytest.mark.parametrize("order", get_args(Norm))
def test_blocks_apply_their_layers_in_sequence(order: Norm) -> None:
    """Before or after each normalisation, and with the options of each layer."""
    plain = TransformerBlock(12, 3, norm=order).double()
    perturb(plain)
    expected = in_sequence(
        order, x(), (plain.attention_norm, plain.attention),
        (plain.feed_forward_norm, plain.feed_forward),
    )  # fmt: skip
    assert_same_function(plain(x()), expected)
    assert isinstance(plain.feed_forward.activation, nn.ReLU)

    scaled = SelfAttentionBlock(Scaled(), 12, norm=order, hidden=20, activation="gelu").double()
    perturb(scaled)
    expected = in_sequence(
        order, x(), (scaled.attention_norm, lambda y: 3.0 * y),
        (scaled.feed_forward_norm, scaled.feed_forward),
    )  # fmt: skip
    assert_same_function(scaled(x(), by=3.0), expected)
    assert scaled.feed_forward.up_proj.out_features == 20
    assert isinstance(scaled.feed_forward.activation, nn.GELU)

    block = DecoderBlock(12, 2, norm=order, hidden=20).double()
    perturb(block)
    source, mask, padding = x(3), Mask.causal(), Mask.padding(torch.tensor([3, 1]))
    expected = in_sequence(
        order, x(),
        (block.attention_norm, lambda y: block.attention(y, mask=mask)),
        (block.memory_norm, lambda y: block.memory_attention(y, source, mask=padding)),
        (block.feed_forward_norm, block.feed_forward),
    )  # fmt: skip
    memory = block.memory_attention.keys_and_values(source)
    assert_same_function(block(x(), memory, mask=mask, memory_mask=padding), expected)
    assert block.feed_forward.up_proj.out_features == 20


def test_blocks_use_the_layer_norm_of_torch() -> None:
    """Biased variance (1 for 3 and 5) and eps inside the root: 1 / sqrt(1 + 3) = 0.5.

    Eps outside the root would give 1 / 4, the unbiased variance 1 / sqrt(2 + 3).
    """
    for block in (TransformerBlock(2, 1, eps=3.0), DecoderBlock(2, 1, eps=3.0)):
        for name, layer in block.named_children():
            if name.endswith("_norm"):
                y = layer(torch.tensor([[3.0, 5.0], [3.0, 3.0]]))
                torch.testing.assert_close(y, torch.tensor([[-0.5, 0.5], [0.0, 0.0]]))


@pytest.mark.parametrize("order", get_args(Norm))
def test_dropout_applies_to_both_residual_branches(order: Norm) -> None:
    """If zero weights silence one branch, the other still varies between calls."""
    for silent in ("attention.out_proj", "feed_forward.down_proj"):
        block = TransformerBlock(12, 3, norm=order, dropout=0.5).double()
        perturb(block)
        block.attention.dropout = 0.0
        layer = block.get_submodule(silent)
        assert isinstance(layer, nn.Linear)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        assert not torch.allclose(block(x()), block(x()))
        block.eval()
        torch.testing.assert_close(block(x()), block(x()), rtol=0, atol=0)


@pytest.mark.parametrize(("activation", "function"), [("relu", nn.ReLU()), ("gelu", nn.GELU())])
def test_feed_forward_is_four_times_as_wide_by_default(
    activation: str, function: nn.Module
) -> None:
    layer = FeedForward(12, activation=activation).double()  # type: ignore[arg-type]
    hidden = x() @ layer.up_proj.weight.T + layer.up_proj.bias
    assert hidden.shape[-1] == 48
    expected = function(hidden) @ layer.down_proj.weight.T + layer.down_proj.bias
    assert_same_function(layer(x()), expected)


def test_feed_forward_drops_the_activations_in_training() -> None:
    layer = FeedForward(12, dropout=0.5).double()
    seen: list[Tensor] = []
    layer.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer(x())
    layer.eval()(x())
    dropped, kept = seen[0] == 0, seen[1]
    assert 0.6 < dropped.double().mean() < 0.9  # half is zero before the dropout
    assert_same_function(seen[0], 2 * kept.masked_fill(dropped, 0.0))
    assert 0.3 < (kept == 0).double().mean() < 0.7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "none"}, "norm must be one of 'post', 'pre', got 'none'"),
        (
            {"activation": "tanh"},
            "activation must be one of 'relu', 'gelu', 'gelu_tanh', got 'tanh'",
        ),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1, got -0.1"),
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerBlock(12, 3, **options)  # type: ignore[arg-type]


def test_recomputed_blocks_save_only_their_inputs() -> None:
    kept = []
    for recompute in (False, True):
        stack = Stack(TransformerBlock(12, 2) for _ in range(3))
        recompute_blocks(stack, recompute)
        numbers = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal numbers
            numbers += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            stack(x().float())
        kept.append(numbers)
    assert kept[1] < kept[0] / 5
