"""Models that read int8 keys and values, against "eager" with the same ones in full precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.huggingface.tiny_models import (
    assert_close,
    build,
    error_of,
    padding,
    tokens,
    transformers,
)
from tests.support.tiers import each
from transformer_kernels import quantize_cache
from transformer_kernels.integrations import huggingface

PARTS = [9, 1, 4, 1, 20, 2]
"""The longest part reads a copy of the keys."""
MODELS = ("llama", "gpt2", "gemma2", "qwen3", "gpt_oss")


def rounded_cache(config: Any, ours: Any = None) -> Any:
    """A cache whose first call returns exact keys and values, and later ones those of int8.

    They are those that `ours` stored, because a rounding error of the model can change an int8.
    """
    library = transformers()
    full = library.cache_utils.DynamicLayer

    class Layer(full):  # type: ignore[misc, valid-type]
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any) -> Any:
            first = self.get_seq_length()
            states = super().update(key_states, value_states)
            stored = self.layer._stored if self.layer else quantize_cache(*states)
            k, v, k_scale, v_scale = (x[:, :, : states[0].shape[2]] for x in stored)
            rounded = k * k_scale[..., None], v * v_scale[..., None]
            return tuple(x.to(key_states) for x in rounded) if first else states

    cache = library.DynamicCache(config=config)
    cache.layers = [
        Layer(ours and ours.layers[n]) if type(one) is full else one
        for n, one in enumerate(cache.layers)
    ]
    return cache


def pair(name: str) -> tuple[Any, Any]:
    """A model with our attention, and the same one with "eager"."""
    dtype = torch.float32 if name == "gpt_oss" else torch.float64  # its experts need float32
    return build(name).to(dtype), build(name, "eager").to(dtype)


def in_parts(model: Any, cache: Any, text: Tensor, visible: Tensor | None) -> Tensor:
    logits, first = [], 0
    with torch.no_grad():
        for part in text.split(PARTS, dim=1):
            last = first + part.shape[1]
            mask = None if visible is None else visible[:, :last]
            found = model(part, attention_mask=mask, past_key_values=cache)
            logits.append(found.logits)
            first = last
    return torch.cat(logits, dim=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_models_read_what_is_stored(name: str, kind: str) -> None:
    ours, eager = pair(name)
    text, visible = tokens(sum(PARTS), batch=3), padding(kind, sum(PARTS))
    cache = huggingface.Int8Cache(ours.config)
    found = in_parts(ours, cache, text, visible)
    expected = in_parts(eager, rounded_cache(eager.config, cache), text, visible)
    exact = in_parts(ours, transformers().DynamicCache(config=ours.config), text, visible)
    shown = torch.ones(found.shape[:2], dtype=torch.bool) if visible is None else visible.bool()
    assert_close(found[shown], expected[shown])
    assert error_of(exact[shown], expected[shown]) > 1e-4
    assert cache.get_seq_length() == sum(PARTS)


def generated(model: Any, cache: Any, **options: Any) -> Tensor:
    text: Tensor = tokens(11, batch=1)
    return model.generate(  # type: ignore[no-any-return]
        text, attention_mask=torch.ones_like(text), past_key_values=cache, max_new_tokens=24,
        do_sample=False, pad_token_id=0, eos_token_id=None, **options,
    )  # fmt: skip


@pytest.mark.exhaustive
@each("way", ["greedy", "beams", "assisted"])
def test_generation(way: str) -> None:
    """With one cache for two texts, which `reset` empties in between."""
    ours, eager = pair("llama")
    options: dict[str, Any] = {"num_beams": 3} if way == "beams" else {}
    if way == "assisted":  # the assistant's weights are nearly the same, so that some tokens fail
        options["assistant_model"] = build("llama", "eager").double()
        with torch.no_grad():
            for p in options["assistant_model"].parameters():
                p.add_(0.05 * torch.randn_like(p))
    cache: Any = huggingface.Int8Cache(ours.config)
    expected = generated(eager, rounded_cache(eager.config), **options)
    for _ in range(2):
        torch.testing.assert_close(generated(ours, cache, **options), expected, rtol=0, atol=0)
        cache.reset()


def first_layer() -> Any:
    return huggingface.Int8Cache(build("llama").config).layers[0]


def test_prompts_are_exact_and_storage_grows_by_an_eighth() -> None:
    layer = first_layer()
    k, v = torch.randn(2, 3, 80, 16), torch.randn(2, 3, 80, 24)
    assert layer.get_seq_length() == 0
    with pytest.raises(ValueError, match="v must be finite"):
        layer.update(k, v / 0)
    assert layer.get_seq_length() == 0
    assert layer.update(k, v) == (k, v)
    stored = quantize_cache(k, v)
    for one, expected in zip(layer._stored, stored, strict=True):
        assert torch.equal(one, expected)
    for count in (1, 1, 10):
        keys, values = layer.update(k[:, :, :count], v[:, :, :count])
    assert keys.shape == (2, 3, 92, 16)
    assert values.shape == (2, 3, 92, 24)
    assert layer._stored.k.shape == (2, 3, 100, 16)  # 80, 90, 100
    assert torch.equal(keys.numbers[:, :, 82:], stored.k[:, :, :10])
    assert torch.equal(values.scale[:, :, 81], stored.v_scale[:, :, 0])


def test_texts_of_a_batch_are_moved() -> None:
    layer = first_layer()
    k, v = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16)
    layer.reorder_cache(torch.tensor([1, 0]))  # no text yet
    layer.update(k, v)
    layer.crop(-2)
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 1, 0, 0]))
    layer.batch_select_indices(torch.tensor([0, 2, 1]))
    layer.offload()
    layer.prefetch()
    keys, values = layer.update(*(x[[1, 0, 0], :, :1] for x in (k, v)))
    for states, x in ((keys, k), (values, v)):
        exact = x[[1, 0, 0]][:, :, [0, 1, 2, 0]]
        error = states.numbers * states.scale[..., None] - exact
        assert bool((error.abs() <= 0.51 * states.scale[..., None]).all())
    layer.crop(-9)
    assert layer.get_seq_length() == 0
    with pytest.raises(ValueError, match="tokens_to_remove must be at most 0, got 2"):
        layer.crop(2)


def in_two_parts(model: Any, **options: Any) -> None:
    cache, text = huggingface.Int8Cache(model.config), tokens(8, batch=3)
    model(text[:, :6], past_key_values=cache)
    model(text[:, 6:], past_key_values=cache, **options)


def test_what_cannot_read_int8_raises_an_error() -> None:
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"the model must have attn_implementation='transf"):
            in_two_parts(build("llama", "sdpa"))
        with pytest.raises(ValueError, match="does not support biases, dense masks and dropout"):
            in_two_parts(build("llama"), attention_mask=torch.zeros(3, 1, 2, 8))
        with pytest.raises(ValueError, match="padding on one side, got a mask with Segments"):
            in_two_parts(build("llama"), attention_mask=padding("gaps", 8))
    with pytest.raises(ValueError, match="for inference: call the model under"):
        in_two_parts(build("llama"))
    assert not hasattr(huggingface, "Int4Cache")
