"""Calls of the suite `models`: the attention of a toy GPT and of well-known models."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_kernels.bench.comparison.calls import Call, Shape

MODELS = (
    ("GPT of four heads, two texts", "2,4,4,32,32,64", "causal"),
    ("Swin-B, first stage, four images", "256,4,4,49,49,32", "full"),
    ("ViT-B/16, eight images", "8,12,12,197,197,64", "full"),
    ("BERT-base, eight texts", "8,12,12,128,128,64", "padding:128,110,96,80,64,48,32,20"),
    ("GPT-2", "1,12,12,1024,1024,64", "causal"),
    ("Llama 3 8B, prefill", "1,32,8,2048,2048,128", "causal"),
    ("Llama 3 8B, one token", "1,32,8,1,2048,128", "full"),
    ("Whisper small, encoder", "1,12,12,1500,1500,64", "full"),
    ("Whisper small, cross-attention", "1,12,12,64,1500,64", "full"),
    ("Stable Diffusion 1.5, first level", "2,8,8,4096,4096,40", "full"),
    ("Stable Diffusion 1.5, text", "2,8,8,4096,77,40", "full"),
    ("Mistral 7B, an eighth of its heads", "1,4,1,8192,8192,128", "window:4096"),
    ("Gemma 3 4B, layer with a window", "1,8,4,2048,2048,256", "window:1024"),
)
"""Names, shapes and masks. Heads, widths and windows are those of the models; batches and contexts
are chosen for a CPU."""

DTYPES = (torch.float32, torch.bfloat16)


def model_calls() -> Iterator[Call]:
    """Every call in both dtypes, without and with gradients."""
    for name, shape, mask in MODELS:
        for dtype in DTYPES:
            yield Call(name=name, shape=Shape.parse(shape), mask=mask, dtype=dtype)


def call_id(call: Call) -> str:
    return f"{call.name.replace(' ', '_')}-{str(call.dtype).removeprefix('torch.')}"
