"""Calls as given on the command line, and those of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import each
from transformer_kernels.bench.comparison.calls import Shape, mask_for, model_calls
from transformer_kernels.masks.mask import Mask


def test_sizes_are_in_the_order_of_the_help_and_equal_ones_are_shown_once() -> None:
    shape = Shape.parse("2,32,8,1,4096,128")
    assert shape == Shape(B=2, H_q=32, H_kv=8, M=1, N=4096, D=128, D_v=128)
    assert str(shape) == "B 2, H 32/8, S 1 x 4096, D 128"
    assert str(Shape.parse(" 1, 8,8 ,64,64,192,128")) == "B 1, H 8, S 64, D 192/128"


@each(
    ("text", "message"),
    [
        ("", "expected B,H_q,H_kv"),
        ("1,8,8,64,64", "expected B,H_q,H_kv"),
        ("1,8,8,64,64,64,64,64", "expected B,H_q,H_kv"),
        ("1,8,8,64,64,-1", "expected B,H_q,H_kv"),
        ("1,8,8,64,64,²", "expected B,H_q,H_kv"),
        ("1,8,8,64,6e4,64", "expected B,H_q,H_kv"),
        ("1,8,8,0,64,64", "M must be at least 1, got 0"),
        ("1,8,3,64,64,64", "H_q must be a multiple of H_kv, got 8 and 3"),
    ],
)
def test_other_shapes_are_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape.parse(text)


SQUARE, STEP = Shape.parse("2,4,4,8,8,16"), Shape.parse("2,4,4,3,8,16")


def visible(text: str, shape: Shape = SQUARE, *, cut: bool = False) -> Tensor:
    mask = mask_for(text, shape, cut=cut)
    assert mask is not None
    return mask.materialize(shape.B, 1, shape.M, shape.N)


def test_forms_of_masks() -> None:
    lower = torch.ones(8, 8).tril().bool()
    ids, keys = torch.tensor([0] * 3 + [1] * 5), torch.arange(8)
    for text, expected in (
        ("causal", lower),
        ("window:3", lower.triu(-2)),
        ("document:3,5", ids[:, None] == ids),
        ("causal + document:3,5", (ids[:, None] == ids) & lower),
        ("full+causal", lower),
        ("padding:5,8", torch.stack([keys < 5, keys < 8])[:, None, None]),
    ):
        assert torch.equal(visible(text), expected.expand(2, 1, 8, 8)), text
    for text in ("causal", "window:3"):
        assert torch.equal(visible(text, STEP), visible(text)[:, :, 5:]), "the last queries"


def test_masks_that_hide_nothing_are_none() -> None:
    """Peers have faster kernels without a mask, and with torch's flag `is_causal`."""
    assert mask_for("full", SQUARE) is None
    assert mask_for("causal", Shape.parse("1,4,4,1,8,16")) is None
    causal = mask_for("causal", SQUARE)
    assert causal is not None
    assert causal.constraints == Mask.causal().constraints


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n5\n", encoding="utf-8")
    assert torch.equal(visible(f"document:{file}"), visible("document:3,5"))
    file.write_text("3 -5", encoding="utf-8")
    with pytest.raises(ValueError, match="expected positive lengths, got '3 -5'"):
        mask_for(f"padding:{file}", SQUARE)
    with pytest.raises(OSError, match="nowhere"):
        mask_for("padding:nowhere.txt", SQUARE)


def test_lengths_are_cut_for_the_check() -> None:
    shorter = Shape.parse("1,4,4,4,4,16")
    assert torch.equal(visible("document:3,5", shorter, cut=True), visible("document:3,1", shorter))
    assert torch.equal(visible("padding:3,8", shorter, cut=True), visible("padding:3", shorter))


FORMS = "expected full, causal, window:W"


@each(
    ("text", "message"),
    [
        ("document:3,4", "documents need M = N tokens, .* M = 8, N = 8 and a sum of 7"),
        ("document:3,6", "documents need M = N tokens, .* M = 8, N = 8 and a sum of 9"),
        ("padding:3", "needs 2 lengths of at most 8, .* got 1 of at most 3"),
        ("padding:3,4,5", "needs 2 lengths of at most 8, .* got 3 of at most 5"),
        ("padding:3,9", "needs 2 lengths of at most 8, .* got 2 of at most 9"),
        *((text, FORMS) for text in ("", "casual", "causal:3", "window", "window:0", "window:-3")),
        *((text, FORMS) for text in ("padding:", "full+")),
    ],
)
def test_other_masks_are_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask_for(text, SQUARE)


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_positions": 1024}
BERT = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 768,
    "num_attention_heads": 12, "max_position_embeddings": 512,
}  # fmt: skip


def calls(folder: Path, config: dict[str, Any], **options: Any) -> list[str]:
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    found = model_calls(file, **options)
    assert found == model_calls(folder, **options)
    return [f"{x.name}: {x.shape}, {x.mask}, {' '.join(x.directions)}" for x in found]


def test_decoders_have_prefill_and_a_step_and_encoders_see_everything(tmp_path: Path) -> None:
    assert calls(tmp_path, LLAMA) == [
        "llama, prefill: B 1, H 32/8, S 2048, D 64, causal, fwd fwd+bwd",
        "llama, decoding: B 1, H 32/8, S 1 x 2048, D 64, full, fwd",
    ]
    assert calls(tmp_path, LLAMA, batch=4, context=300, directions=("bwd",)) == [
        "llama, prefill: B 4, H 32/8, S 300, D 64, causal, bwd",
        "llama, decoding: B 4, H 32/8, S 1 x 300, D 64, full, fwd",
    ]
    assert "gpt2, prefill: B 1, H 12, S 1024, D 64, causal" in calls(tmp_path, GPT2)[0]
    assert calls(tmp_path, BERT) == ["bert, encoder: B 1, H 12, S 512, D 64, full, fwd fwd+bwd"]
    assert "prefill" in calls(tmp_path, BERT | {"is_decoder": True})[0]


def test_layers_with_a_window_are_calls_of_their_own(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma = LLAMA | {"head_dim": 256, "sliding_window": 512, "layer_types": kinds}
    assert calls(tmp_path, gemma, directions=("fwd",)) == [
        "llama, prefill, window: B 1, H 32/8, S 2048, D 256, window:512, fwd",
        "llama, decoding, window: B 1, H 32/8, S 1 x 512, D 256, full, fwd",
        "llama, prefill, full: B 1, H 32/8, S 2048, D 256, causal, fwd",
        "llama, decoding, full: B 1, H 32/8, S 1 x 2048, D 256, full, fwd",
    ]
    mistral = LLAMA | {"sliding_window": 4096}
    assert "causal" in calls(tmp_path, mistral)[0]
    assert "window:4096" in calls(tmp_path, mistral, context=8192)[0]
    unused = LLAMA | {"sliding_window": 512, "use_sliding_window": False}
    assert calls(tmp_path, unused) == calls(tmp_path, LLAMA)
    nested = {"architectures": ["GemmaForConditionalGeneration"], "text_config": LLAMA}
    assert calls(tmp_path, nested) == calls(tmp_path, LLAMA)


def test_other_configurations_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, message in (
        ("{", "is not JSON"),
        ("[1]", "expected an object, got list"),
        ("{}", "no heads: expected one of num_attention_heads, n_head"),
        ('{"n_head": 4}', "no width: expected one of hidden_size"),
        ('{"n_head": 4, "n_embd": "64"}', "no width: expected one of hidden_size"),
        (json.dumps(GPT2), "the model has 1024 positions, got --context 2048"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            model_calls(file, context=2048)
    with pytest.raises(OSError, match="nowhere"):
        model_calls(tmp_path / "nowhere")
