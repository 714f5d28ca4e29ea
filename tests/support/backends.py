"""Backends and their dtypes, for tests that run all of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.emulated import NOT_EMULATED
from transformer_kernels.backends import BACKENDS, CpuBackend, CudaBackend

_ELSEWHERE = {"triton": torch.cuda.is_available(), "cuda": NOT_EMULATED is not None}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = tuple(backend.name for backend in BACKENDS if not _ELSEWHERE.get(backend.name))
"""Backends that run on CPU tensors. With a GPU, Triton is not interpreted, and tests/gpu covers it.
The CUDA kernels are included if the emulator can run them."""


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that a backend supports."""
    return DTYPES[1:] if backend in ("triton", "cuda") else DTYPES


DECODING = tuple(name for name in NAMES if name != "triton")
"""Backends with kernels for `attention_decode`."""
WITH_FLOAT64 = tuple(name for name in NAMES if torch.float64 in dtypes_of(name))
DECODING_AND_DTYPES = tuple((name, dtype) for name in DECODING for dtype in dtypes_of(name))
BACKENDS_AND_DTYPES = tuple((name, dtype) for name in NAMES for dtype in dtypes_of(name))

_COMPILED = {backend.name: backend for backend in (CpuBackend(), CudaBackend())}
COMPILED_BACKENDS = tuple(name for name in NAMES if name in _COMPILED)
"""Backends of csrc/, whose operators share one schema."""
COMPILED_AND_DTYPES = tuple((n, dtype) for n, dtype in BACKENDS_AND_DTYPES if n in _COMPILED)


def operators_of(backend: str) -> Any:
    """Returns the namespace of a compiled backend's operators for CPU tensors."""
    return _COMPILED[backend].operators(torch.device("cpu"))
