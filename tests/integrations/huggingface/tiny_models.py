"""Small models of transformers with random weights, and their inputs; nothing is downloaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn

from transformer_kernels.integrations.huggingface import NAME, register

LENGTH = 19
"""Tokens of a row."""
VOCABULARY = 61
END = 60
"""The end of a text, whose features CLIP compares with the image's."""

Inputs = dict[str, Any]

_SIZES = {"hidden_size": 32, "intermediate_size": 48}
_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = _SIZES | _TOKENS | {"max_position_embeddings": 64}
_GROUPED = _TEXT | {"num_key_value_heads": 2, "head_dim": 8}
_HEADS = {"num_key_value_heads": 4, "head_dim": 8}
_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_SEQ2SEQ = _TOKENS | {"decoder_start_token_id": 1, "d_model": 32}
for _part in ("encoder", "decoder"):
    _SEQ2SEQ |= {f"{_part}_layers": 2, f"{_part}_attention_heads": 4, f"{_part}_ffn_dim": 48}
_IMAGE = _SIZES | {"image_size": 20, "patch_size": 4}


@dataclass(frozen=True)
class Tiny:
    """A model of two layers.

    `kind` says which tokens are compared: all of a "decoder" and an "encoder" that are not padding;
    those of the decoder of "seq2seq"; the whole output of "image" and "pair".
    """

    model: str
    sizes: dict[str, Any]
    kind: Literal["decoder", "encoder", "seq2seq", "image", "pair"]
    output: str = "logits"
    image_tokens: str = ""
    """Argument that says which tokens of a text are those of images"""
    config: str = ""
    """Name of the class; default: that of the model with "Config" after the family."""

    @property
    def config_class(self) -> str:
        return self.config or f"{re.split('For|LMHead|Model', self.model)[0]}Config"


TINY = {
    "gpt2": Tiny(
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
        "decoder",
    ),
    "llama": Tiny("LlamaForCausalLM", _GROUPED, "decoder"),
    "mistral": Tiny("MistralForCausalLM", _GROUPED | {"sliding_window": 5}, "decoder"),
    "gemma2": Tiny(
        "Gemma2ForCausalLM",
        _GROUPED | _SLIDING | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
        "decoder",
    ),
    "gemma3": Tiny("Gemma3ForCausalLM", _GROUPED | _SLIDING, "decoder", config="Gemma3TextConfig"),
    "qwen3": Tiny("Qwen3ForCausalLM", _GROUPED, "decoder"),
    "gpt_oss": Tiny("GptOssForCausalLM", _GROUPED | _SLIDING | _EXPERTS, "decoder"),
    "llama4": Tiny(
        "Llama4ForCausalLM",
        _GROUPED
        | _EXPERTS
        | {"attention_chunk_size": 5, "intermediate_size_mlp": 48}
        | {"layer_types": ["chunked_attention", "full_attention"]},
        "decoder",
        config="Llama4TextConfig",
    ),
    "gemma3_images": Tiny(
        "Gemma3ForConditionalGeneration",
        {"text_config": _GROUPED | _SLIDING, "vision_config": _IMAGE, "mm_tokens_per_image": 1},
        "decoder",
        image_tokens="token_type_ids",
    ),
    "paligemma": Tiny(
        "PaliGemmaForConditionalGeneration",
        {"text_config": _GROUPED | {"model_type": "gemma"}, "projection_dim": 32}
        | {"vision_config": _IMAGE | {"model_type": "siglip_vision_model"}},
        "decoder",
        image_tokens="token_type_ids",
        config="PaliGemmaConfig",
    ),
    "molmo2": Tiny(
        "Molmo2ForConditionalGeneration",
        {"text_config": _GROUPED, "vit_config": _SIZES | _HEADS | {"image_size": [20, 20]}}
        | {"adapter_config": _SIZES | _HEADS | {"vit_layers": [-1], "text_hidden_size": 32}},
        "decoder",
        image_tokens="mm_token_type_ids",
    ),
    "embedding_gemma": Tiny(
        "Gemma3TextModel",
        _GROUPED | _SLIDING | {"use_bidirectional_attention": True},
        "encoder",
        "last_hidden_state",
        config="Gemma3TextConfig",
    ),
    "bert": Tiny("BertForMaskedLM", _TEXT, "encoder"),
    "modernbert": Tiny(
        "ModernBertForMaskedLM",
        _TEXT
        | {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        "encoder",
    ),
    "t5": Tiny(
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
        | {"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0},
        "seq2seq",
    ),
    "bart": Tiny(
        "BartForConditionalGeneration",
        _SEQ2SEQ | {"max_position_embeddings": 64, "dropout": 0.0},
        "seq2seq",
    ),
    "whisper": Tiny(
        "WhisperForConditionalGeneration",
        _SEQ2SEQ
        | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
        | {"begin_suppress_tokens": None},
        "seq2seq",
    ),
    "vit": Tiny("ViTModel", _IMAGE, "image", "last_hidden_state"),
    "clip": Tiny(
        "CLIPModel",
        {"text_config": _TEXT | {"eos_token_id": END}, "vision_config": _IMAGE}
        | {"projection_dim": 16},
        "pair",
        "logits_per_text",
    ),
}


def names(*kinds: str) -> list[str]:
    """Returns the models of these kinds."""
    return [name for name, tiny in TINY.items() if tiny.kind in kinds]


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="make test-all installs transformers")


def build(name: str, attn_implementation: str = NAME, **changes: Any) -> Any:
    library, tiny = transformers(), TINY[name]
    register()
    config = getattr(library, tiny.config_class)(**tiny.sizes | changes)
    torch.manual_seed(0)
    model = getattr(library, tiny.model)
    return with_large_weights(model._from_config(config, attn_implementation=attn_implementation))


def with_large_weights(model: Any) -> Any:
    """Returns the model in evaluation mode, with weights by which attention is not uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def padding(kind: str, length: int = LENGTH) -> Tensor | None:
    """Returns (3, length), 1 = a token: "right" or "left" padding, "gaps", "all" tokens or "none".

    The last token is never padding for "left", nor the first one otherwise.
    """
    position = torch.arange(length)
    match kind:
        case "none":
            return None
        case "all":
            visible = torch.ones(3, length, dtype=torch.bool)
        case "right":
            visible = position < torch.tensor([[length], [length // 2], [1]])
        case "left":
            visible = position >= torch.tensor([[0], [length // 2], [length - 1]])
        case "gaps":
            visible = (position % 5 != torch.tensor([[1], [2], [3]])) & (position < length - 1)
        case _:
            raise ValueError(kind)
    return visible.long()


PADDINGS = ("none", "all", "right", "left", "gaps")


def named_paddings() -> list[tuple[str, str]]:
    """Returns each model with each kind of padding; images have none."""
    return [
        (name, kind_of_padding)
        for name, tiny in TINY.items()
        for kind_of_padding in (PADDINGS if tiny.kind != "image" else ("none",))
    ]


def tokens(length: int = LENGTH, batch: int = 3) -> Tensor:
    """Random tokens without special ones."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, END, (batch, length), generator=generator)


def inputs(name: str, kind_of_padding: str) -> tuple[Inputs, Tensor | None]:
    """Returns the arguments of the model, and the mask of the outputs to compare."""
    generator = torch.Generator().manual_seed(2)
    visible = padding(kind_of_padding)
    kind = TINY[name].kind
    images = torch.randn(3, 3, 20, 20, generator=generator)
    if kind == "image":
        return {"pixel_values": images}, None
    text: Inputs = {"input_ids": tokens(), "attention_mask": visible}
    if kind == "pair":
        text["input_ids"][torch.arange(3), -1 if visible is None else _last(visible)] = END
        return text | {"pixel_values": images}, None
    if TINY[name].image_tokens:
        runs = torch.tensor(
            [[3, 6, 3, 3, 4], [0, 4, 8, 7, 0], [16, 3, 0, 0, 0]]
        )  # text, image, ...
        types = [torch.arange(5).repeat_interleave(row) % 2 for row in runs]
        text[TINY[name].image_tokens] = torch.stack(types)
    if kind != "seq2seq":
        return text, visible
    if name == "whisper":
        text = {"input_features": torch.randn(3, 8, 40, generator=generator)}
    decoder = padding("none" if kind_of_padding == "none" else "right", 11)
    return (text | {"decoder_input_ids": tokens(11), "decoder_attention_mask": decoder}, decoder)


def _last(visible: Tensor) -> Tensor:
    return visible.shape[1] - 1 - visible.flip(1).argmax(1)


Run = tuple[Tensor, dict[str, Tensor]]
"""Outputs at tokens, and the gradient of each parameter; 0 where there is none."""


def run(model: nn.Module, name: str, kind_of_padding: str = "right", **more: Any) -> Run:
    arguments, visible = inputs(name, kind_of_padding)
    model.zero_grad()
    output = getattr(model(**arguments, **more), TINY[name].output)
    if visible is not None:
        output = output[visible.bool()]
    return output.detach(), gradients_of(model, output)


def generated(model: Any, prompts: Inputs | None = None, **more: Any) -> Tensor:
    """Returns greedy tokens; the default prompts are padded on the left."""
    model.generation_config.eos_token_id = None
    prompts = prompts or {"input_ids": tokens(9), "attention_mask": padding("left", 9)}
    found: Tensor = model.generate(**prompts, max_new_tokens=10, do_sample=False, **more)
    return found


def gradients_of(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Returns the gradient of each parameter, of a function of the outputs; 0 where there is none.

    Those of earlier calls must be cleared.
    """
    output.sin().sum().backward()
    return {
        key: torch.zeros_like(x) if x.grad is None else x.grad.clone()
        for key, x in model.named_parameters()
    }


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Returns the error relative to the largest value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def errors_of_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns errors relative to the largest value of the parameter, or a thousandth of all.

    The gradient of a key's bias is 0 up to rounding: a shift of all scores has no effect.
    """
    sizes = {name: x.abs().max().item() for name, x in expected.items() if x.numel()}
    least = 1e-3 * max(sizes.values())
    return {
        name: (actual[name] - expected[name]).abs().max().item() / max(size, least)
        for name, size in sizes.items()
    }


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    error = error_of(actual, expected)
    assert error <= tolerance, f"{error:.1e} off"


def assert_same_run(actual: Run, expected: Run) -> None:
    assert_close(actual[0], expected[0])
    for name, error in errors_of_gradients(actual[1], expected[1]).items():
        assert error <= 1e-4, f"{name} is {error:.1e} off"
