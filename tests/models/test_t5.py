"""T5: agreement with its formulas for every implementation, decoding, and initial weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import huggingface
from tests.models.t5_by_formula import T5ByFormula, random_tensors
from tests.models.zoo import IMPLEMENTATIONS, LENGTHS, T5_CONFIG, TARGET, entry_of, tokens
from tests.support.tiers import each
from transformer_kernels import attention_decode
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import T5, T5Config
from transformer_kernels.nn import AttnImplementation, T5Block, attention

V1_1 = replace(T5_CONFIG, activation="gated_gelu", tied_embeddings=False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("config", [T5_CONFIG, V1_1], ids=["t5", "t5-v1.1"])
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
    for config in (T5_CONFIG, V1_1):
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
