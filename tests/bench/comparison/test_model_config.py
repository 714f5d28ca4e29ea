from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from transformer_kernels.bench.comparison.model_config import model_calls

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
    return [f"{one.name}: {one.shape}, {one.mask.text}, {one.trains}" for one in found]


def test_decoders_have_prefill_and_a_step(tmp_path: Path) -> None:
    assert calls(tmp_path, LLAMA) == [
        "llama, prefill: B 1, H 32/8, S 2048, D 64, causal, True",
        "llama, decoding: B 1, H 32/8, S 1 x 2048, D 64, full, False",
    ]
    assert calls(tmp_path, LLAMA, batch=4, context=300)[1] == (
        "llama, decoding: B 4, H 32/8, S 1 x 300, D 64, full, False"
    )
    assert calls(tmp_path, GPT2)[0] == "gpt2, prefill: B 1, H 12, S 1024, D 64, causal, True"


def test_encoders_see_everything(tmp_path: Path) -> None:
    assert calls(tmp_path, BERT) == ["bert, encoder: B 1, H 12, S 512, D 64, full, True"]
    assert "prefill" in calls(tmp_path, BERT | {"is_decoder": True})[0]


def test_layers_with_a_window_are_calls_of_their_own(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma = LLAMA | {"head_dim": 256, "sliding_window": 512, "layer_types": kinds}
    assert calls(tmp_path, gemma) == [
        "llama, prefill, window: B 1, H 32/8, S 2048, D 256, window:512, True",
        "llama, decoding, window: B 1, H 32/8, S 1 x 512, D 256, full, False",
        "llama, prefill, full: B 1, H 32/8, S 2048, D 256, causal, True",
        "llama, decoding, full: B 1, H 32/8, S 1 x 2048, D 256, full, False",
    ]
    mistral = LLAMA | {"sliding_window": 4096}
    assert "causal" in calls(tmp_path, mistral)[0]
    assert "window:4096" in calls(tmp_path, mistral, context=8192)[0]
    unused = LLAMA | {"sliding_window": 512, "use_sliding_window": False}
    assert calls(tmp_path, unused) == calls(tmp_path, LLAMA)


def test_text_model_of_a_multimodal_one(tmp_path: Path) -> None:
    nested = {"architectures": ["GemmaForConditionalGeneration"], "text_config": LLAMA}
    assert calls(tmp_path, nested) == calls(tmp_path, LLAMA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected an object, got list"),
        ("{}", "no heads: expected one of num_attention_heads, n_head"),
        ('{"n_head": 4}', "no width: expected one of hidden_size"),
        ('{"n_head": 4, "n_embd": "64"}', "no width: expected one of hidden_size"),
    ],
)
def test_other_files_are_errors(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        model_calls(file)


def test_more_tokens_than_positions_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model has 1024 positions, got --context 2048"):
        calls(tmp_path, GPT2, context=2048)
    with pytest.raises(OSError, match="nowhere"):
        model_calls(tmp_path / "nowhere")
