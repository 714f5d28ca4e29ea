"""Which backend takes which dtype, for tests that run all of them."""

from __future__ import annotations

import torch

from transformer_kernels.backends import BACKENDS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = tuple(
    backend.name
    for backend in BACKENDS
    if not (backend.name == "triton" and torch.cuda.is_available())
)
"""of those that CPU tensors are given to. Where there is a GPU Triton is not interpreted, and its
tests are in tests/gpu."""


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    return DTYPES[1:] if backend == "triton" else DTYPES


WITH_FLOAT64 = tuple(name for name in NAMES if torch.float64 in dtypes_of(name))
BACKENDS_AND_DTYPES = tuple((name, dtype) for name in NAMES for dtype in dtypes_of(name))
