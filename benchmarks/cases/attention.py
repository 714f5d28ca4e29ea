"""Cases of the suites `attention` and `masks`. In each case every query sees at least one key."""

from __future__ import annotations

import torch

from transformer_kernels.bench import Case
from transformer_kernels.masks.block_patterns import local, strided
from transformer_kernels.masks.mask import Mask

LENGTHS = (512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MASKED_LENGTH = 2048
_BLOCK = 64


def attention_cases() -> list[Case]:
    """Cases that vary the sequence length, with and without a causal mask."""
    masks = {"full": (None, "none"), "causal": (Mask.causal(), "causal")}
    return [
        Case(name=name, M=length, N=length, dtype=dtype, mask=mask, mask_name=mask_name)
        for dtype in DTYPES
        for name, (mask, mask_name) in masks.items()
        for length in LENGTHS
    ]


def mask_cases() -> list[Case]:
    """Cases that vary the visible fraction, with every kind of mask."""
    length = _MASKED_LENGTH
    blocks = length // _BLOCK
    causal = Mask.causal()
    masks = [
        ("full", "none", None),
        ("causal", "causal", causal),
        ("causal as a tensor", "dense", Mask.dense(causal.materialize(1, 1, length, length))),
        ("window 1024", "window", Mask.window(1023, 0)),
        ("window 256", "window", Mask.window(255, 0)),
        ("window 64", "window", Mask.window(63, 0)),
        ("3/4 padding", "padding", Mask.padding(torch.tensor([length // 4]))),
        ("documents of 512", "segments", documents(length, 512)),
        ("documents of 128, causal", "segments and causal", documents(length, 128) & causal),
        ("local blocks", "block_sparse", Mask.block_sparse(local(blocks, blocks, 4), _BLOCK)),
        ("strided blocks", "block_sparse", Mask.block_sparse(strided(blocks, blocks, 4), _BLOCK)),
    ]
    return [
        Case(name=name, M=length, N=length, mask=mask, mask_name=mask_name)
        for name, mask_name, mask in masks
    ]


def documents(length: int, size: int) -> Mask:
    """Segment mask of documents of `size` tokens in one row."""
    return Mask.segments(torch.arange(length)[None] // size)


def case_id(case: Case) -> str:
    return f"{case.name.replace(' ', '_')}-{case.dtype_name}-{case.N}"
