"""Files of T5: variations between them, and errors for invalid ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import huggingface
from tests.models.t5_by_formula import Tensors, random_tensors
from transformer_kernels.models import T5, T5Config

CONFIG = T5Config(
    layers=2, decoder_layers=1, heads=3, width=10, head_size=5, hidden=14, vocabulary=31, buckets=6
)
V1_1 = replace(CONFIG, activation="gated_gelu", tied_embeddings=False)
TENSORS, V1_1_TENSORS = random_tensors(CONFIG), random_tensors(V1_1)
TABLE = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
CROSS = "decoder.block.0.layer.1.EncDecAttention"


def assert_loads_as(actual: Path, expected: Path) -> None:
    weights = [T5.from_safetensors(file).state_dict() for file in (actual, expected)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_config_follows_from_names_and_shapes(tmp_path: Path) -> None:
    file = huggingface.write(TENSORS, tmp_path)
    assert T5.from_safetensors(file).config == CONFIG
    other = T5.from_safetensors(file, max_distance=50, dropout=0.25)
    assert other.config == replace(CONFIG, max_distance=50, dropout=0.25)
    assert not other.training
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    assert T5.from_safetensors(huggingface.write(V1_1_TENSORS, tmp_path)).config == V1_1


def test_copies_of_the_embedding_and_the_unused_table_are_accepted(tmp_path: Path) -> None:
    expected = huggingface.write(TENSORS, tmp_path / "expected")
    embedding = TENSORS["shared.weight"]
    copies = {
        f"{name}.weight": embedding.clone()
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    }
    unused = {f"{CROSS}.relative_attention_bias.weight": torch.ones(6, 3)}
    for more in (copies, unused, copies | unused):
        file = huggingface.write(TENSORS | more, tmp_path / "actual")
        assert T5.from_safetensors(file).config == CONFIG
        assert_loads_as(file, expected)


Change = Callable[[Tensors], Tensors]


def replaced(name: str, *shape: int) -> Change:
    return lambda tensors: tensors | {name: torch.ones(shape)}


def removed(name: str) -> Change:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed("shared.weight"), "lacks shared.weight, which the model needs"),
        (removed(TABLE), f"lacks {TABLE}, which the model needs"),
        (removed(TABLE.replace("enc", "dec")), f"lacks {TABLE.replace('enc', 'dec')}, which"),
        (removed(f"{CROSS}.k.weight"), f"lacks {CROSS}.k.weight, which"),
        (removed("decoder.block.0.layer.2.layer_norm.weight"), "lacks decoder.block.0.layer.2.lay"),
        (
            removed("encoder.block.1.layer.1.DenseReluDense.wo.weight"),
            "lacks .*Dense.wo.weight, wh",
        ),
        (
            removed("encoder.final_layer_norm.weight"),
            "lacks encoder.final_layer_norm.weight, which",
        ),
        (lambda tensors: {}, "lacks shared.weight"),
        (
            replaced("encoder.block.1.layer.0.SelfAttention.q.weight", 15, 11),
            r"SelfAttention.q.weight of .* must have shape \(15, 10\), got \(15, 11\)",
        ),
        (
            replaced("encoder.block.0.layer.0.SelfAttention.q.weight", 16, 10),
            r"SelfAttention.q.weight of .* must have shape \(15, 10\), got \(16, 10\)",
        ),
        (replaced(f"{CROSS}.o.weight", 10, 14), r"o.weight of .* shape \(10, 15\), got \(10, 14\)"),
        (replaced(TABLE, 6), r"bias.weight of .* must be a non-empty matrix, got shape \(6,\)"),
        (
            replaced("lm_head.weight", 31, 9),
            r"lm_head.weight of .* shape \(31, 10\), got \(31, 9\)",
        ),
        (
            replaced("decoder.embed_tokens.weight", 31, 10),
            "decoder.embed_tokens.weight of .* must equal the tensor that it is tied to",
        ),
        (
            replaced(TABLE.replace("block.0", "block.1"), 6, 3),
            "has unexpected tensors: encoder.block.1.layer.0.SelfAttention.relative_attention_bias",
        ),
        (
            replaced("encoder.block.1.layer.0.SelfAttention.q.bias", 15),
            "has unexpected tensors: encoder.block.1.layer.0.SelfAttention.q.bias$",
        ),
        (
            replaced("encoder.block.1.layer.1.DenseReluDense.wi_1.weight", 14, 10),
            "has unexpected tensors: encoder.block.1.layer.1.DenseReluDense.wi_1.weight$",
        ),
    ],
)
def test_invalid_files_raise_value_error_with_one_line(
    change: Change, message: str, tmp_path: Path
) -> None:
    file = huggingface.write(change(TENSORS), tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        T5.from_safetensors(file)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_file_of_v1_1_needs_both_up_projections(tmp_path: Path) -> None:
    name = "decoder.block.0.layer.2.DenseReluDense.wi_1.weight"
    file = huggingface.write(removed(name)(V1_1_TENSORS), tmp_path)
    with pytest.raises(ValueError, match=f"lacks {name}, which the model needs"):
        T5.from_safetensors(file)


def test_unknown_attn_implementation_raises_before_the_file_is_read() -> None:
    with pytest.raises(ValueError, match="attn_implementation must be one of 'eager', 'fused'"):
        T5.from_safetensors("no file", attn_implementation="fast")  # type: ignore[arg-type]
