"""`register`. Models that do not call `AttentionInterface` refuse our name; the masks of others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.huggingface.tiny_models import (
    assert_close,
    tokens,
    transformers,
    with_large_weights,
)
from transformer_kernels.integrations.huggingface import NAME, register

NEEDS_TRANSFORMERS = pytest.mark.exhaustive  # `make test` does not install it
SIZES = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
BLOOM = r"^Bloom\w* computes attention in its own code \(transformers.models.bloom.*use \"eager\""


def bloom(attn_implementation: str = "eager") -> Any:
    register()
    config = transformers().BloomConfig(**SIZES, attn_implementation=attn_implementation)
    return transformers().BloomForCausalLM(config)


@NEEDS_TRANSFORMERS
def test_pretrained_models(tmp_path: Path) -> None:
    bloom().save_pretrained(tmp_path)
    for model in (transformers().AutoModel, transformers().AutoModelForCausalLM):
        with pytest.raises(ValueError, match=BLOOM):
            model.from_pretrained(tmp_path, attn_implementation=NAME)


@NEEDS_TRANSFORMERS
def test_models_made_from_a_config() -> None:
    """Before classes are chosen by the name, which was a KeyError."""
    library = transformers()
    with pytest.raises(ValueError, match=BLOOM):
        bloom(NAME)
    config = library.GPTJConfig(n_embd=32, n_layer=1, n_head=4, attn_implementation=NAME)
    with pytest.raises(ValueError, match="GPTJModel computes attention in its own code"):
        library.GPTJModel(config)
    config = library.FalconConfig(**SIZES, attn_implementation=NAME)
    with pytest.raises(ValueError, match=r'use "eager", or "sdpa" inside transformer_kernels.en'):
        library.FalconModel(config)


@NEEDS_TRANSFORMERS
def test_set_attn_implementation() -> None:
    """Nothing is changed, in a part of a model either."""
    model = bloom()
    with pytest.raises(ValueError, match=BLOOM):
        model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("eager")


@NEEDS_TRANSFORMERS
def test_parts_of_a_model() -> None:
    """A dict chooses the parts that take our kernels."""
    library = transformers()
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    text = library.LlamaConfig(**sizes, vocab_size=61, intermediate_size=48)
    vision = library.Data2VecVisionConfig(**sizes, intermediate_size=48, image_size=32)
    config = library.LlavaConfig(text_config=text, vision_config=vision)
    with pytest.raises(ValueError, match=r"Data2VecVisionModel .*A dict chooses for the parts"):
        library.LlavaForConditionalGeneration._from_config(config, attn_implementation=NAME)
    parts = {"text_config": NAME, "vision_config": "eager"}
    model = library.LlavaForConditionalGeneration._from_config(config, attn_implementation=parts)
    assert model.model.language_model.config._attn_implementation == NAME
    assert model.model.vision_tower.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="Data2VecVisionModel"):
        model.set_attn_implementation(NAME)


@pytest.mark.parametrize("module", ["notebook", "tests.integrations.huggingface.test_refused"])
@NEEDS_TRANSFORMERS
def test_classes_of_users(module: str) -> None:
    """Their bases decide, in a notebook and in a file with attention of another kind."""
    library = transformers()
    llama = SIZES | {"num_attention_heads": 4, "num_hidden_layers": 1}
    served = type("Mine", (library.LlamaForCausalLM,), {"__module__": module})
    served(library.LlamaConfig(**llama, attn_implementation=NAME))
    refused = type("Mine", (library.BloomForCausalLM,), {"__module__": module})
    with pytest.raises(ValueError, match="Mine computes attention in its own code"):
        refused(library.BloomConfig(**SIZES, attn_implementation=NAME))


class PoolingAttention(nn.Module):
    """Attention of another kind."""


@pytest.mark.parametrize("use_cache", [True, False])
@NEEDS_TRANSFORMERS
def test_last_queries_of_shared_layers(use_cache: bool) -> None:
    """Gemma 4 slices the mask in layers that share keys."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers().Gemma4TextConfig(
        vocab_size=61, vocab_size_per_layer_input=61, hidden_size_per_layer_input=8,
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=8, num_kv_shared_layers=2,
        sliding_window=5, layer_types=kinds,
    )  # fmt: skip
    arguments = {"input_ids": tokens(19), "logits_to_keep": 4, "use_cache": use_cache}
    ours, eager = outputs("Gemma4ForCausalLM", config, **arguments)
    assert_close(ours.logits, eager.logits)


@NEEDS_TRANSFORMERS
def test_causal_modules_that_say_otherwise() -> None:
    """The modules of Informer's decoder have is_causal=False, and a causal mask."""
    config = transformers().InformerConfig(
        prediction_length=6, context_length=8, d_model=16, lags_sequence=[1, 2],
        encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_time_features=1, attention_type="full",
        distil=False,
    )  # fmt: skip
    arguments = {
        "past_values": torch.randn(2, 10),
        "past_observed_mask": torch.ones(2, 10),
        "past_time_features": torch.zeros(2, 10, 1),
        "future_time_features": torch.zeros(2, 6, 1),
        "future_values": torch.randn(2, 6),
    }
    ours, eager = outputs("InformerModel", config, **arguments)
    assert_close(ours.last_hidden_state, eager.last_hidden_state)


@NEEDS_TRANSFORMERS
def test_cross_attention_without_a_mask() -> None:
    """Every image token is visible. The module has no attribute `is_causal`."""
    from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention

    config = transformers().MllamaTextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2
    )
    module, found = MllamaTextCrossAttention(config, layer_idx=0), []
    for count in (5, 9):
        x, images = torch.randn(2, 9, 32), torch.randn(2, count, 32)
        for name in (NAME, "eager"):
            config._attn_implementation = name
            found.append(module(x, images)[0])
        assert_close(found[-2], found[-1])


def outputs(model: str, config: Any, **arguments: Any) -> tuple[Any, Any]:
    """Returns the outputs of a model with our attention and with "eager"."""
    register()
    found = []
    for name in (NAME, "eager"):
        torch.manual_seed(0)
        made = getattr(transformers(), model)._from_config(config, attn_implementation=name)
        with torch.no_grad():
            found.append(with_large_weights(made)(**arguments))
    return found[0], found[1]


@NEEDS_TRANSFORMERS
def test_without_register_the_name_is_unknown() -> None:
    library = transformers()
    register()
    config = library.LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    with pytest.raises(ValueError, match="is not supported"):
        library.LlamaModel._from_config(config, attn_implementation="transformer_kernel")


def test_a_missing_or_old_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install transformer_kernels\[huggingface\]"):
        register()
    monkeypatch.undo()
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: object())
    for version in ("4.57.1", "5.3.0"):
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
        with pytest.raises(ImportError, match=rf"needs transformers 5.4 or later, got {version}"):
            register()
