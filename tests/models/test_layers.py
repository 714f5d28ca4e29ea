"""Blocks, positions, padding of batches, and masks that follow their module."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models.zoo import randn, saved_sizes
from tests.support.tiers import each
from transformer_kernels import Mask, attention
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    Activation,
    DecoderBlock,
    FeedForward,
    LearnedPositions,
    MaskBuffer,
    Norm,
    RowColumnPositions,
    SelfAttentionBlock,
    SinusoidalPositions,
    Stack,
    TransformerBlock,
    distance_sinusoids,
    recompute_blocks,
    sinusoids,
)
from transformer_kernels.nn.masking import check_lengths, clear_padding, masked_mean


def x(T: int = 5) -> Tensor:
    return randn(2, T, 12)


def perturb(block: nn.Module) -> None:
    """Adds noise to all parameters, so that swapped weights or biases change the result."""
    with torch.no_grad():
        for n, parameter in enumerate(block.parameters()):
            parameter.add_(0.3 * randn(*parameter.shape, seed=n))


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


@each(("activation", "function"), [("relu", nn.ReLU()), ("gelu", nn.GELU())])
def test_feed_forward_is_four_times_as_wide_by_default(
    activation: Activation, function: nn.Module
) -> None:
    layer = FeedForward(12, activation=activation).double()
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


@each(
    ("options", "message"),
    [
        ({"norm": "none"}, "norm must be one of 'post', 'pre', got 'none'"),
        ({"activation": "tanh"}, "activation must be one of 'relu', .*'gelu_tanh', got 'tanh'"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1, got -0.1"),
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerBlock(12, 3, **options)


def test_recomputed_blocks_save_only_their_inputs() -> None:
    kept = []
    for recompute in (False, True):
        stack = Stack(TransformerBlock(12, 2) for _ in range(3))
        recompute_blocks(stack, recompute)
        kept.append(sum(saved_sizes(partial(stack, x().float()))))
    assert kept[1] < kept[0] / 5


# Positions


@pytest.mark.parametrize("width", [8, 7, 1])
def test_sinusoids_follow_the_paper_at_even_and_odd_widths(width: int) -> None:
    table = sinusoids(50, width)
    assert table.shape == (50, width)
    for position in (0, 1, 49):
        for column in range(width):
            angle = position / 10000 ** (2 * (column // 2) / width)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[position, column].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("clamp", [None, 30, 49])
@pytest.mark.parametrize("width", [8, 7, 1])
def test_distance_sinusoids_are_sines_then_cosines(width: int, clamp: int | None) -> None:
    table = distance_sinusoids(50, width, clamp=clamp)
    sines = (width + 1) // 2
    assert table.shape == (50, width)
    for distance in (0, 1, 29, 30, 31, 49):
        clamped = distance if clamp is None else min(distance, clamp)
        for column in range(width):
            angle = clamped / 10000 ** (2 * (column % sines) / width)
            expected = math.sin(angle) if column < sines else math.cos(angle)
            assert table[distance, column].item() == pytest.approx(expected, abs=1e-13)


def test_sinusoidal_positions_are_added_and_not_saved() -> None:
    module = SinusoidalPositions(10, 5)
    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(module(x), x + sinusoids(10, 5)[:4])
    assert not module.state_dict()
    assert not list(module.parameters())


def test_learned_positions_are_added_and_trained() -> None:
    module = LearnedPositions(10, 5)
    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(module(x), x + module.table[:4])
    module(x).sum().backward()
    assert module.table.grad is not None
    assert module.table.grad[:, 0].tolist() == [2.0] * 4 + [0.0] * 6


@each("kind", [LearnedPositions, SinusoidalPositions])
def test_positions_may_start_at_an_offset_within_the_context(
    kind: type[LearnedPositions | SinusoidalPositions],
) -> None:
    positions, x = kind(7, 4), torch.randn(2, 7, 4)
    torch.testing.assert_close(positions(x[:, 3:], start=3), positions(x)[:, 3:])
    for start, count in ((4, 4), (0, 8)):
        with pytest.raises(ValueError, match=r"at most 7 positions long \(the context\), got 8"):
            positions(torch.zeros(1, count, 4), start=start)
    with pytest.raises(ValueError, match="whole number of at least 1, got 0"):
        kind(3, 0)
    assert positions.to("meta")(torch.empty(2, 4, 4, device="meta")).device.type == "meta"


@pytest.mark.parametrize("start", [0, 5, 40])
def test_rows_and_columns_of_positions_repeat_after_the_last_row(start: int) -> None:
    positions = RowColumnPositions(rows=3, columns=4, width=5)
    x = torch.randn(2, 17, 5, generator=torch.Generator().manual_seed(0))
    added = positions(x, start=start) - x
    for t in range(17):
        p = start + t
        expected = positions.rows[p // 4 % 3] + positions.columns[p % 4]
        assert_same_function(added[:, t], expected.expand(2, -1))


def test_each_text_may_start_at_a_row_and_column_of_its_own() -> None:
    positions, x = RowColumnPositions(rows=3, columns=4, width=5), torch.randn(2, 6, 5)
    y = positions(x, start=torch.tensor([[2], [40]]))
    torch.testing.assert_close(y[0], positions(x, start=2)[0])
    torch.testing.assert_close(y[1], positions(x, start=40)[1])


@each(
    ("call", "name"),
    [
        (lambda: RowColumnPositions(rows=0, columns=4, width=5), "rows"),
        (lambda: RowColumnPositions(rows=3, columns=0, width=5), "columns"),
        (lambda: RowColumnPositions(rows=3, columns=4, width=0), "width"),
        (lambda: distance_sinusoids(0, 8), "length"),
        (lambda: distance_sinusoids(5, 8, clamp=0), "clamp"),
    ],
)
def test_sizes_of_positions_below_one_raise_value_error(
    call: Callable[[], object], name: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
        call()


# Padding and masks


def inputs() -> Tensor:
    return randn(3, 5, 4)


@each("dtype", [torch.int32, torch.int64])
def test_mean_excludes_padding(dtype: torch.dtype) -> None:
    """The mean of an empty sequence is 0; without lengths nothing is padding."""
    lengths = torch.tensor([5, 0, 3], dtype=dtype)
    expected = torch.stack([inputs()[0].mean(0), torch.zeros(4).double(), inputs()[2, :3].mean(0)])
    assert_same_function(masked_mean(inputs(), lengths), expected)
    assert_same_function(masked_mean(inputs(), None), inputs().mean(dim=1))
    assert torch.equal(clear_padding(inputs(), None), inputs())
    assert masked_mean(inputs()[:, :0], None).tolist() == [[0.0] * 4] * 3


def test_nan_in_padding_reaches_no_result_and_no_gradient() -> None:
    lengths = torch.tensor([5, 1, 3])
    x = inputs()
    x[1, 1:] = x[2, 3:] = math.nan
    x.requires_grad_()
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = clear_padding(x, lengths) * weight
    gradients = torch.autograd.grad(y.square().sum() + masked_mean(y, lengths).sum(), [x, weight])
    assert y.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][1, 1:].tolist() == [[0.0] * 4] * 4


@each(
    ("lengths", "error", "message"),
    [
        ([1, 2, 3], TypeError, "a tensor of int32 or int64, got list"),
        (torch.ones(3), TypeError, "a tensor of int32 or int64, got torch.float32"),
        (torch.ones(3).bool(), TypeError, "a tensor of int32 or int64, got torch.bool"),
        (torch.tensor([1, 2]), ValueError, "(batch,) = (3,), got shape (2,)"),
        (torch.tensor([[1, 2, 3]]), ValueError, "(batch,) = (3,), got shape (1, 3)"),
        (torch.tensor([1, 6, 3]), ValueError, "from 0 to 5, the padded length, got 6 at index 1"),
        (torch.tensor([1, 5, -1]), ValueError, "from 0 to 5, the padded length, got -1 at index 2"),
    ],
)
def test_invalid_lengths_raise(lengths: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(f"it must be {message}")):
        check_lengths("it", lengths, batch=3, max_length=5)


def test_valid_lengths_pass() -> None:
    """Values on devices other than the CPU are not read."""
    valid = torch.tensor([0, 5, 1], dtype=torch.int32)
    for lengths in (None, valid, valid.to("meta")):
        check_lengths("it", lengths, batch=3, max_length=5)
    assert masked_mean(inputs().to("meta"), valid.to("meta")).device.type == "meta"


T = 7
IDS, LENGTHS = torch.arange(T)[None] // 3, torch.tensor([5])
EVERY_KIND = (
    Mask.window(4, 1, align="bottom_right")
    & Mask.padding(LENGTHS)
    & Mask.key_range(LENGTHS - 4, LENGTHS)
    & Mask.segments(IDS)
    & Mask.segments(IDS + torch.arange(T), IDS, equal=False)
    & Mask.positions(IDS, IDS + 1, 2, 3)
    & Mask.dense(torch.rand(T, T) > 0.3)
    & Mask.block_sparse(torch.ones(4, 4, dtype=torch.bool), 2)
)
TENSORS = 11


class Attention(nn.Module):
    def __init__(self, mask: Mask, **options: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.mask = MaskBuffer(mask, **options)

    def forward(self, q: Tensor) -> Tensor:
        return attention(q, q, q, mask=self.mask())


def test_mask_buffer_holds_every_kind_of_mask() -> None:
    mask = MaskBuffer(EVERY_KIND)()
    assert [type(one) for one in mask.constraints] == [type(one) for one in EVERY_KIND.constraints]
    assert len(mask.tensors()) == TENSORS
    assert torch.equal(mask.materialize(1, 2, T, T), EVERY_KIND.materialize(1, 2, T, T))
    assert MaskBuffer(Mask())().constraints == ()
    with pytest.raises(TypeError, match="mask must be a Mask, got None"):
        MaskBuffer(None)  # type: ignore[arg-type]


def test_mask_buffer_moves_with_the_module() -> None:
    module = Attention(EVERY_KIND).half()
    assert {x.dtype for _, x in module.mask().tensors()} == {torch.int64, torch.bool}
    assert copy.deepcopy(module).to("meta").mask().device == torch.device("meta")
    assert {x.device.type for _, x in module.to("meta").mask().tensors()} == {"meta"}
    empty = module.to_empty(device="cpu").mask()
    assert [(name, x.shape, x.dtype) for name, x in empty.tensors()] == [
        (name, x.shape, x.dtype) for name, x in EVERY_KIND.tensors()
    ]


def test_mask_buffer_is_in_the_state_dict_on_request() -> None:
    assert list(Attention(EVERY_KIND).state_dict()) == ["proj.weight", "proj.bias"]
    saved = Attention(Mask.causal() & Mask.padding(LENGTHS), persistent=True).state_dict()
    other = Attention(Mask.causal() & Mask.padding(LENGTHS - 2), persistent=True)
    other.load_state_dict(saved)
    assert torch.equal(saved["mask.end_1"], LENGTHS)
    assert torch.equal(other.mask().tensors()[0][1], LENGTHS)


def test_compiled_code_reads_the_mask_buffer() -> None:
    module, q = Attention(EVERY_KIND), torch.randn(1, 2, T, 4)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), attention(q, q, q, mask=EVERY_KIND))
