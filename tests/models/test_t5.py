"""T5: buckets of distances and their bias, layers, and the model against its formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import huggingface
from tests.models.huggingface import Tensors, t5_tensors
from tests.models.zoo import IMPLEMENTATIONS, LENGTHS, T5_CONFIG, T5_V1_1, TARGET, entry_of, tokens
from tests.support.oracle import bucket_by_integers
from tests.support.runtime import default_dtype
from tests.support.tiers import each
from transformer_kernels import attention_decode
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import T5, T5Config
from transformer_kernels.nn import (
    AttnImplementation,
    BucketedBias,
    T5Block,
    T5FeedForward,
    attention,
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
def test_invalid_sizes_of_a_bias_raise_value_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketedBias(**{"heads": 2, "bidirectional": True} | arguments)


def test_dropout_of_the_feed_forward_network_is_between_its_projections() -> None:
    torch.manual_seed(0)
    layer = T5FeedForward(10, 1000, activation="gated_gelu", dropout=0.5).double()
    x = torch.randn(2, 9, 10, dtype=torch.float64)
    inner: list[Tensor] = []
    layer.down_proj.register_forward_pre_hook(lambda _, inputs: inner.append(inputs[0]))
    layer(x)
    layer.eval()(x)
    assert 0.45 < (inner[0] == 0).double().mean() < 0.55
    assert inner[1].all()


@each(
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


# Model


@dataclass(frozen=True)
class T5ByFormula:
    """T5 in plain torch on the tensors of a file, for one text pair without padding."""

    tensors: Tensors
    config: T5Config

    def logits(self, source: Tensor, target_in: Tensor) -> Tensor:
        """source (S,), target_in (T,) -> (T, vocabulary)."""
        y = self.stack("decoder", target_in, self.stack("encoder", source, None))
        if self.config.tied_embeddings:
            return self.linear("shared", y / self.config.width**0.5)
        return self.linear("lm_head", y)

    def stack(self, stack: str, tokens: Tensor, memory: Tensor | None) -> Tensor:
        x, bias = self.tensors["shared.weight"][tokens], self.bias(stack, len(tokens))
        for n in range(self.config.layers if memory is None else self.config.decoder_layers):
            block = f"{stack}.block.{n}.layer"
            y = self.norm(f"{block}.0.layer_norm", x)
            x = x + self.attention(f"{block}.0.SelfAttention", y, y, bias)
            if memory is not None:
                y = self.norm(f"{block}.1.layer_norm", x)
                x = x + self.attention(f"{block}.1.EncDecAttention", y, memory, 0.0)
            last = f"{block}.{1 if memory is None else 2}"
            y = self.norm(f"{last}.layer_norm", x)
            x = x + self.feed_forward(f"{last}.DenseReluDense", y)
        return self.norm(f"{stack}.final_layer_norm", x)

    def bias(self, stack: str, T: int) -> Tensor:
        """(heads, T, T); -inf above the diagonal in the decoder."""
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        sizes, encoder = (self.config.buckets, self.config.max_distance), stack == "encoder"
        rows = [
            [bucket_by_integers(i - j, *sizes, bidirectional=encoder) for j in range(T)]
            for i in range(T)
        ]
        bias = self.tensors[table][torch.tensor(rows)].permute(2, 0, 1)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        return bias if encoder else bias.masked_fill(future, float("-inf"))

    def attention(self, name: str, x: Tensor, source: Tensor, bias: Tensor | float) -> Tensor:
        q, k, v = (
            self.linear(f"{name}.{layer}", y).unflatten(1, (self.config.heads, -1)).transpose(0, 1)
            for layer, y in (("q", x), ("k", source), ("v", source))
        )
        o = (q @ k.mT + bias).softmax(dim=-1) @ v
        return self.linear(f"{name}.o", o.transpose(0, 1).flatten(1))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        if self.config.activation == "relu":
            return self.linear(f"{name}.wo", self.linear(f"{name}.wi", x).relu())
        gate = nn.functional.gelu(self.linear(f"{name}.wi_0", x), approximate="tanh")
        return self.linear(f"{name}.wo", gate * self.linear(f"{name}.wi_1", x))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x / (mean_square + self.config.eps).sqrt() * self.tensors[f"{name}.weight"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("config", [T5_CONFIG, T5_V1_1], ids=["t5", "t5-v1.1"])
def test_loaded_model_matches_the_formulas(
    config: T5Config, implementation: AttnImplementation, tmp_path: Path
) -> None:
    tensors = t5_tensors(config)
    with default_dtype(torch.float64):
        t5 = T5.from_safetensors(
            huggingface.write(tensors, tmp_path),
            max_distance=5,
            dropout=0.0,
            attn_implementation=implementation,
        )
    assert t5.config == config
    logits = t5(tokens(), TARGET, LENGTHS)
    formula = T5ByFormula(tensors, config)
    for b, length in enumerate(LENGTHS.tolist()):
        assert_same_function(logits[b], formula.logits(tokens()[b, :length], TARGET[b]))


def test_fused_decoding_stores_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step passes the table of distances to `attention_decode`, in each layer."""
    calls: list[tuple[int, ...]] = []

    def record(*args: Any, **options: Any) -> Tensor:
        calls.append(tuple(options["relative"].table.shape))
        o: Tensor = attention_decode(*args, **options)
        return o

    monkeypatch.setattr(attention, "attention_decode", record)
    entry_of("t5").build().generate(tokens(), LENGTHS, most=4, end=0)
    assert calls == [(3, 6)] * (3 * 4)


def test_each_stack_has_one_table_of_buckets() -> None:
    t5 = entry_of("t5").build()
    shapes = [tuple(p.shape) for name, p in t5.named_parameters() if "table" in name]
    assert shapes == [(6, 3)] * 2
    assert (t5.encoder.positions.lowest, t5.decoder.positions.lowest) == (-5, 0)


def test_new_model_has_logits_of_unit_size() -> None:
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "width": 128, "head_size": 32, "hidden": 256, "heads": 4, "vocabulary": 500,
    }  # fmt: skip
    for config in (T5_CONFIG, T5_V1_1):
        t5 = T5(replace(config, **small))
        text = torch.randint(500, (2, 30), generator=torch.Generator().manual_seed(1))
        assert t5(text, text).std().item() == pytest.approx(1.0, rel=0.2)
        block = t5.encoder.blocks[0]
        assert isinstance(block, T5Block)
        x = torch.randn(2, 30, 128)
        k, v = block.attention.keys_and_values(x)
        q = block.attention.queries(x).unflatten(2, (4, 32)).transpose(1, 2)
        for y in (k, v, q @ k.mT):
            assert y.std().item() == pytest.approx(1.0, rel=0.15)
        table = t5.encoder.positions.table
        assert table.std().item() == pytest.approx(128**-0.5, rel=0.4)


@each(
    ("changes", "message"),
    [
        ({"buckets": 3}, "buckets must be at least 4 for a bidirectional bias, got 3"),
        ({"max_distance": 3}, "max_distance must be above 3, .* among 6 buckets, got 3"),
    ],
)
def test_unsuitable_buckets_raise_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(T5_CONFIG, **changes)
