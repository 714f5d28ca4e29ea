"""Cases of the suite `cpu`. The goals select cases by the prefix of their names."""

from __future__ import annotations

import torch

from benchmarks.cases.attention import DTYPES, documents
from transformer_kernels.bench import Case
from transformer_kernels.masks.mask import Mask

COST_LENGTH = 2048
BLOCK = 64


def sdpa_cases() -> list[Case]:
    """Cases to compare with torch's SDPA: from short batched sequences to long ones, wide heads."""
    masks = {"full": (None, "none"), "causal": (Mask.causal(), "causal")}
    return [
        Case(
            name=name, B=B, M=length, N=length, D=D, D_v=D,
            dtype=dtype, mask=mask, mask_name=mask_name,
        )
        for dtype in DTYPES
        for B, length, D in ((4, 512, 64), (1, 2048, 64), (1, 4096, 128))
        for name, (mask, mask_name) in masks.items()
    ]  # fmt: skip


def mask_cost_cases(dtype: torch.dtype) -> list[Case]:
    """No mask, and masks whose cost should be proportional to the visible fraction."""
    S = COST_LENGTH
    blocks = torch.arange(S // BLOCK)
    quarter = (blocks[:, None] - blocks) % 4 == 0
    masks = [
        ("masks: none", "none", None),
        ("masks: half padding", "padding", Mask.padding(torch.tensor([S // 2]))),
        ("masks: window of S/8", "window", Mask.window(S // 8 - 1, 0)),
        ("masks: 25% of blocks", "block_sparse", Mask.block_sparse(quarter[None], BLOCK)),
        ("masks: two documents", "segments", documents(S, S // 2)),
    ]
    return [
        Case(name=name, M=S, N=S, dtype=dtype, mask=mask, mask_name=mask_name)
        for name, mask_name, mask in masks
    ]


def option_cost_cases(dtype: torch.dtype) -> list[Case]:
    """No option, and each training option alone. The bias is (1, H, S, S)."""
    S, H = COST_LENGTH, 8
    bias = torch.randn(1, H, S, S, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [
        Case(name="options: none", M=S, N=S, dtype=dtype),
        Case(name="options: dropout 0.1", M=S, N=S, dtype=dtype, dropout_p=0.1),
        Case(name="options: bias", M=S, N=S, dtype=dtype, bias=bias),
        Case(
            name="options: bias and its gradient", M=S, N=S, dtype=dtype,
            bias=bias.clone().requires_grad_(),
        ),
    ]  # fmt: skip


def decode_cases() -> list[Case]:
    """Decoding of a language model: one query per head against a long cache."""
    return [
        Case(name="decode", B=B, H_q=H_q, H_kv=8, M=1, N=N, D=D, D_v=D, dtype=dtype)
        for dtype in DTYPES
        for B, H_q, N, D in ((1, 32, 8192, 128), (8, 8, 4096, 64))
    ]


def short_cases() -> list[Case]:
    """Short sequences, dominated by the overhead of a call."""
    return [
        Case(name="short", B=B, H_q=H, H_kv=H, M=S, N=S, D=D, D_v=D, dtype=dtype)
        for dtype in DTYPES
        for B, H, S, D in ((32, 8, 64, 32), (1, 1, 16, 64))
    ]


def scaling_cases() -> list[Case]:
    """Cases for thread scaling: many heads with uneven rows, and a single head."""
    return [
        case
        for dtype in (torch.bfloat16, torch.float32)
        for case in (
            Case(
                name="scaling: causal", M=2048, N=2048, dtype=dtype,
                mask=Mask.causal(), mask_name="causal",
            ),
            Case(name="scaling: one head", H_q=1, H_kv=1, M=4096, N=4096, dtype=dtype),
        )
    ]  # fmt: skip
