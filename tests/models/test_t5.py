"""T5: agreement with its formulas for every implementation, visibility, padding and generation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models import huggingface
from tests.models.t5_by_formula import T5ByFormula, random_tensors
from tests.support.tiers import each
from transformer_kernels import attention_decode
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import T5, T5Config
from transformer_kernels.nn import (
    AttnImplementation,
    BucketedBias,
    T5Block,
)
from transformer_kernels.nn import attention as cache_module

TINY = T5Config(
    layers=2, decoder_layers=3, heads=3, width=10, head_size=5, hidden=14, vocabulary=31,
    buckets=6, max_distance=5, dropout=0.0,
)  # fmt: skip
"""Distances beyond max_distance occur in texts of 7 tokens."""
V1_1 = replace(TINY, activation="gated_gelu", tied_embeddings=False)
CONFIGS = pytest.mark.parametrize("config", [TINY, V1_1], ids=["t5", "t5-v1.1"])
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
EACH = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
LENGTHS = torch.tensor([9, 1, 6])
TARGET_LENGTHS = torch.tensor([4, 11, 2])


def texts(lengths: Tensor, seed: int) -> Tensor:
    """(3, longest): random texts with trailing padding of 0."""
    longest = int(lengths.max())
    text = torch.randint(2, 31, (3, longest), generator=torch.Generator().manual_seed(seed))
    return text.where(torch.arange(longest) < lengths[:, None], 0)


SOURCE, TARGET = texts(LENGTHS, 1), texts(TARGET_LENGTHS, 2)
IS_TARGET = torch.arange(11) < TARGET_LENGTHS[:, None]


def model(config: T5Config = TINY, attn_implementation: AttnImplementation = "fused") -> T5:
    """A model with large weights, because a new model's attention is almost uniform."""
    t5 = T5(config, attn_implementation=attn_implementation).double()
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in t5.parameters():
            parameter.normal_(std=0.4)
    return t5


def loss(logits: Tensor) -> Tensor:
    """Loss of predicting each token of TARGET from those before it, without the padding."""
    kept = IS_TARGET[:, 1:]
    return nn.functional.cross_entropy(logits[:, :-1][kept], TARGET[:, 1:][kept])


# Agreement


@EACH
@CONFIGS
def test_loaded_model_matches_the_formulas(
    config: T5Config, implementation: AttnImplementation, tmp_path: Path
) -> None:
    tensors = random_tensors(config)
    with huggingface.default_dtype(torch.float64):
        t5 = T5.from_safetensors(
            huggingface.write(tensors, tmp_path),
            max_distance=5,
            dropout=0.0,
            attn_implementation=implementation,
        )
    assert t5.config == config
    logits = t5(SOURCE, TARGET, LENGTHS)
    formula = T5ByFormula(tensors, config)
    for b, length in enumerate(LENGTHS.tolist()):
        assert_same_function(logits[b], formula.logits(SOURCE[b, :length], TARGET[b]))


@pytest.mark.exhaustive
@EACH
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str
)
@CONFIGS
def test_logits_and_gradients_match_huggingface(
    config: T5Config,
    dtype: torch.dtype,
    tolerance: float,
    implementation: AttnImplementation,
    tmp_path: Path,
) -> None:
    theirs = huggingface.t5(config, dtype)
    expected = theirs(
        input_ids=SOURCE,
        attention_mask=(torch.arange(9) < LENGTHS[:, None]).long(),
        decoder_input_ids=TARGET,
        decoder_attention_mask=IS_TARGET.long(),
    ).logits
    loss(expected).backward()
    with huggingface.default_dtype(dtype):
        file = huggingface.saved(theirs, tmp_path)
        ours = T5.from_safetensors(file, max_distance=5, attn_implementation=implementation)
        gradients = T5.from_safetensors(huggingface.saved_gradients(theirs, tmp_path))
    logits = ours(SOURCE, TARGET, LENGTHS)
    loss(logits).backward()
    huggingface.assert_same(logits[IS_TARGET], expected[IS_TARGET], tolerance=tolerance)
    huggingface.assert_same_gradients(ours, gradients, tolerance=tolerance)


@pytest.mark.exhaustive
@EACH
@CONFIGS
def test_greedy_tokens_match_huggingface(
    config: T5Config, implementation: AttnImplementation, tmp_path: Path
) -> None:
    theirs = huggingface.t5(replace(config, decoder_layers=2))
    vary_tokens(theirs)
    generated = theirs.generate(
        input_ids=SOURCE,
        attention_mask=(torch.arange(9) < LENGTHS[:, None]).long(),
        do_sample=False,
        num_beams=1,
        max_new_tokens=25,
    )
    expected = [row[1:] for row in generated.tolist()]
    with huggingface.default_dtype(torch.float64):
        ours = T5.from_safetensors(
            huggingface.saved(theirs, tmp_path),
            max_distance=5,
            attn_implementation=implementation,
        )
    for cached in (True, False):
        tokens = ours.generate(SOURCE, LENGTHS, most=25, cached=cached)
        assert tokens == [row[: row.index(1)] if 1 in row else row for row in expected]
    assert len({token for row in expected for token in row}) > 4


@pytest.mark.exhaustive
@CONFIGS
def test_file_of_huggingface_has_the_names_of_the_formulas(
    config: T5Config, tmp_path: Path
) -> None:
    tensors = huggingface.read(huggingface.saved(huggingface.t5(config), tmp_path))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes == {name: tensor.shape for name, tensor in random_tensors(config).items()}


# Visibility and padding


# Generation


def vary_tokens(t5: nn.Module) -> None:
    """Scales norms and buckets, so that generated tokens do not repeat from the first one on."""
    with torch.no_grad():
        for name, parameter in t5.named_parameters():
            if "norm" in name or "relative_attention_bias" in name or "table" in name:
                parameter.mul_(3.0)


def test_fused_decoding_stores_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step passes the table of distances to `attention_decode`, in each layer."""
    calls: list[tuple[int, ...]] = []

    def record(*args: Any, **options: Any) -> Tensor:
        calls.append(tuple(options["relative"].table.shape))
        o: Tensor = attention_decode(*args, **options)
        return o

    monkeypatch.setattr(cache_module, "attention_decode", record)
    model().generate(SOURCE, LENGTHS, most=4, end=30)
    assert calls == [(3, 6)] * (3 * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most": 0}, "most must be a whole number of at least 1, got 0"),
        ({"begin": 31}, "begin must be a token from 0 to 30, got 31"),
        ({"end": -1}, "end must be a token from 0 to 30, got -1"),
        ({"source_lengths": LENGTHS + 1}, "source_lengths must be from 0 to 9, .* got 10 at"),
    ],
)
def test_invalid_arguments_raise_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().generate(SOURCE, **{"most": 5} | changes)


# Parameters, dropout and sizes


def test_each_stack_has_one_table_of_buckets() -> None:
    shapes = [tuple(p.shape) for name, p in model().named_parameters() if "table" in name]
    assert shapes == [(6, 3)] * 2
    encoder, decoder = (each for each in model().modules() if isinstance(each, BucketedBias))
    assert (encoder.lowest, decoder.lowest) == (-5, 0)


def test_new_model_has_logits_of_unit_size() -> None:
    torch.manual_seed(0)
    small = {"width": 128, "head_size": 32, "hidden": 256, "heads": 4, "vocabulary": 500}
    for config in (TINY, V1_1):
        t5 = T5(replace(config, **small))  # type: ignore[arg-type]
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
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"decoder_layers": 0}, "decoder_layers must be a whole number of at least 1, got 0"),
        ({"head_size": 0}, "head_size must be a whole number of at least 1, got 0"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"activation": "gelu"}, "activation must be one of 'relu', 'gated_gelu', got 'gelu'"),
        ({"buckets": 3}, "buckets must be at least 4 for a bidirectional bias, got 3"),
        ({"max_distance": 3}, "max_distance must be above 3, .* among 6 buckets, got 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"eps": 0.0}, "eps must be above 0, got 0.0"),
    ],
)
def test_invalid_configs_raise_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)
