"""Time and peak memory over the sequence length. Every query sees at least one key."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.runner.checks import compared
from benchmarks.runner.run import Comparison
from transformer_kernels.bench import Case
from transformer_kernels.masks.mask import Mask

LENGTHS = (512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = {"full": (None, "none"), "causal": (Mask.causal(), "causal")}


def cases() -> list[Case]:
    return [
        Case(name=name, M=length, N=length, dtype=dtype, mask=mask, mask_name=mask_name)
        for dtype in DTYPES
        for name, (mask, mask_name) in MASKS.items()
        for length in LENGTHS
    ]


def comparisons() -> Iterator[Comparison]:
    for case in cases():
        yield compared(case, ("fwd", "bwd", "fwd+bwd"))
