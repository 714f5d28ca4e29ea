"""Cases of the suites `attention` and `masks`. In each case every query sees at least one key."""

from __future__ import annotations

import torch

from transformer_kernels.bench import Case
from transformer_kernels.masks.block_patterns import fixed, local, strided
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
        ("half the keys", "key_range", key_range(length // 4, length * 3 // 4)),
        ("3/4 padding", "padding", Mask.padding(torch.tensor([length // 4]))),
        ("documents of 512", "segments", documents(length, 512)),
        ("all but itself", "segments", Mask.segments(torch.arange(length)[None], equal=False)),
        ("positions, zigzag", "positions", causal_by(zigzag(length))),
        ("positions, shuffled", "positions", causal_by(torch.randperm(length))),
        ("documents of 128, causal", "segments and causal", documents(length, 128) & causal),
        ("local blocks", "block_sparse", Mask.block_sparse(local(blocks, blocks, 4), _BLOCK)),
        ("strided blocks", "block_sparse", Mask.block_sparse(strided(blocks, blocks, 4), _BLOCK)),
        ("fixed blocks", "block_sparse", Mask.block_sparse(fixed(blocks, blocks, 4), _BLOCK)),
    ]
    return [
        Case(name=name, M=length, N=length, mask=mask, mask_name=mask_name)
        for name, mask_name, mask in masks
    ]


def documents(length: int, size: int) -> Mask:
    """Segment mask of documents of `size` tokens in one row."""
    return Mask.segments(torch.arange(length)[None] // size)


def key_range(start: int, end: int) -> Mask:
    return Mask.key_range(torch.tensor([start]), torch.tensor([end]))


def zigzag(length: int) -> torch.Tensor:
    """Positions of 8 chunks in the order 0, 7, 1, 6, ...: two to a device, with equal work."""
    chunks = torch.arange(length).chunk(8)
    return torch.cat([chunk for n in range(4) for chunk in (chunks[n], chunks[7 - n])])


def causal_by(positions: torch.Tensor) -> Mask:
    """Causal mask by the position of each token."""
    return Mask.positions(positions[None], positions[None])


def case_id(case: Case) -> str:
    return f"{case.name.replace(' ', '_')}-{case.dtype_name}-{case.N}"
