"""Small HuggingFace models with random weights, as a reference for ours, and files like theirs.

Nothing is downloaded. Tests that use the models are marked `exhaustive`, because `make test` does
not install transformers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from transformer_kernels.models import ReformerConfig, T5Config

FILE = "model.safetensors"
Tensors = dict[str, Tensor]
"""Tensors by their names in a file of HuggingFace"""


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="make test-all installs transformers")


def gpt2(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """GPT2LMHeadModel: two layers, two heads of 64, context 20, 61 tokens."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 128, "n_positions": 20, "vocab_size": 61}
    library = _transformers()
    config = library.GPT2Config(**sizes | {"bos_token_id": 1, "eos_token_id": 1} | changes)
    return _random(library.GPT2LMHeadModel(config), dtype)


def bert(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model of class `kind`: two layers, two heads of 64, hidden 72, context 20, 61 tokens."""
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 128,
        "intermediate_size": 72,
        "max_position_embeddings": 20,
        "vocab_size": 61,
    }
    library = _transformers()
    return _random(getattr(library, kind)(library.BertConfig(**sizes | changes)), dtype)


def t5(config: T5Config, dtype: torch.dtype = torch.float64) -> Any:
    """T5ForConditionalGeneration with the sizes of `config`, without dropout.

    In float64 its normalisations are replaced: they have the mean square in float32.
    """
    library = _transformers()
    theirs = library.T5Config(
        vocab_size=config.vocabulary,
        d_model=config.width,
        d_kv=config.head_size,
        d_ff=config.hidden,
        num_layers=config.layers,
        num_decoder_layers=config.decoder_layers,
        num_heads=config.heads,
        relative_attention_num_buckets=config.buckets,
        relative_attention_max_distance=config.max_distance,
        feed_forward_proj=config.activation.replace("_", "-"),
        tie_word_embeddings=config.tied_embeddings,
        decoder_start_token_id=0,
    )
    model = library.T5ForConditionalGeneration(theirs)
    if not config.tied_embeddings:  # transformers 5 ties new models in any case
        model.lm_head.weight = nn.Parameter(torch.empty(config.vocabulary, config.width))
    if dtype == torch.float64:
        for name, _ in list(model.named_modules()):
            if name.endswith("layer_norm"):
                parent, _, own = name.rpartition(".")
                norm = nn.RMSNorm(config.width, eps=config.eps)
                setattr(model.get_submodule(parent), own, norm)
    return _random(model, dtype, std=0.4)


def reformer(config: ReformerConfig) -> Any:
    """ReformerModelWithLMHead in float64 with the sizes of `config`, and four buckets.

    Learned positions, no dropout; hashes are the same in every layer and at every call.
    """
    library = _transformers()
    theirs = library.ReformerConfig(
        attn_layers=["lsh"] * config.layers,
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        attention_head_size=config.width // config.heads,
        num_attention_heads=config.heads,
        feed_forward_size=config.hidden or 4 * config.width,
        max_position_embeddings=config.context,
        axial_pos_embds=False,
        lsh_attn_chunk_length=config.chunk,
        num_hashes=config.rounds,
        num_buckets=4,
        hash_seed=0,
        hidden_act="relu",
        hidden_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        is_decoder=True,
        pad_token_id=0,
        eos_token_id=0,
    )
    return _random(library.ReformerModelWithLMHead(theirs), torch.float64)


def _random(model: nn.Module, dtype: torch.dtype, std: float = 0.2) -> nn.Module:
    """Redraws every parameter with a large deviation, so that swapped parameters show."""
    generator = torch.Generator().manual_seed(3)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


def t5_tensors(config: T5Config) -> Tensors:
    """Random tensors of a file of T5, in float64, large enough that a swapped one shows."""
    width, hidden, inner = config.width, config.hidden, config.heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (config.vocabulary, width)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary, width)
    for stack, layers in (("encoder", config.layers), ("decoder", config.decoder_layers)):
        shapes[f"{stack}.final_layer_norm.weight"] = (width,)
        kinds = ["SelfAttention", "EncDecAttention"][: 1 if stack == "encoder" else 2]
        for n in range(layers):
            block = f"{stack}.block.{n}.layer"
            for place, kind in enumerate(kinds):
                for name in "qkv":
                    shapes[f"{block}.{place}.{kind}.{name}.weight"] = (inner, width)
                shapes[f"{block}.{place}.{kind}.o.weight"] = (width, inner)
            feed_forward = f"{block}.{len(kinds)}.DenseReluDense"
            for name in ["wi"] if config.activation == "relu" else ["wi_0", "wi_1"]:
                shapes[f"{feed_forward}.{name}.weight"] = (hidden, width)
            shapes[f"{feed_forward}.wo.weight"] = (width, hidden)
            for place in range(len(kinds) + 1):
                shapes[f"{block}.{place}.layer_norm.weight"] = (width,)
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes[table] = (config.buckets, config.heads)
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def saved(model: Any, folder: Path) -> Path:
    """Saves the model with transformers' own `save_pretrained`; returns the file."""
    model.save_pretrained(folder)
    return folder / FILE


def saved_gradients(model: nn.Module, folder: Path) -> Path:
    """Saves the model's gradients under the names of its weights, 0 where there is none.

    Loading the file with `from_safetensors` maps each gradient to our parameter.
    """
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return write({name: gradient.contiguous() for name, gradient in gradients.items()}, folder)


def write(tensors: Tensors, folder: Path) -> Path:
    """Writes a safetensors file of these tensors; returns the file."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / FILE)
    return folder / FILE


def read(file: Path) -> Tensors:
    """Returns the tensors of a safetensors file."""
    tensors: Tensors = load_file(file)
    return tensors


def assert_same(actual: Tensor, expected: Tensor, *, tolerance: float, name: str = "") -> None:
    """Equal up to `tolerance`, relative to the largest value (at least 0.001)."""
    assert actual.dtype == expected.dtype
    error = (actual - expected).abs().max().item()
    assert error <= tolerance * max(expected.abs().max().item(), 1e-3), f"{name} is {error} off"


def assert_same_gradients(actual: nn.Module, expected: nn.Module, *, tolerance: float) -> None:
    """Compares the gradients of `actual` with the weights of `expected`."""
    wanted = dict(expected.named_parameters())
    assert [name for name, _ in actual.named_parameters()] == list(wanted)
    for name, parameter in actual.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_same(found, wanted[name], tolerance=tolerance, name=name)
