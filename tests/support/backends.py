"""Backends and their dtypes, for tests that run all of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.emulated import NOT_EMULATED
from transformer_kernels.backends import BACKENDS, CpuBackend, CudaBackend
from transformer_kernels.backends.native.cuda_support import not_built_reason

_ELSEWHERE = {"triton": torch.cuda.is_available(), "cuda": NOT_EMULATED is not None}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = tuple(backend.name for backend in BACKENDS if not _ELSEWHERE.get(backend.name))
"""Backends that run on CPU tensors. With a GPU, Triton is not interpreted. The CUDA kernels are
included if the emulator can run them."""


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that a backend supports."""
    return DTYPES[1:] if backend in ("triton", "cuda") else DTYPES


ON_GPU = tuple(
    name
    for name in ("triton", "cuda")
    if torch.cuda.is_available() and not (name == "cuda" and not_built_reason())
)
"""Backends whose tables run on a GPU."""
TABLE_WAYS = tuple(
    (backend.name, dtype, torch.device("cuda" if backend.name in ON_GPU else "cpu"))
    for backend in BACKENDS
    if backend.name in (*NAMES, *ON_GPU)
    for dtype in dtypes_of(backend.name)
)
"""Backends, dtypes and devices of the tables."""

DECODING = tuple(name for name in NAMES if name != "triton")
"""Backends with kernels for `attention_decode`."""
WITH_FLOAT64 = tuple(name for name in NAMES if torch.float64 in dtypes_of(name))
DECODING_WAYS = tuple(way for way in TABLE_WAYS if way[0] != "triton")
DECODING_AND_DTYPES = tuple((name, dtype) for name in DECODING for dtype in dtypes_of(name))
BACKENDS_AND_DTYPES = tuple((name, dtype) for name in NAMES for dtype in dtypes_of(name))

_COMPILED = {backend.name: backend for backend in (CpuBackend(), CudaBackend())}
COMPILED_BACKENDS = tuple(name for name in NAMES if name in _COMPILED)
"""Backends of csrc/, whose operators share one schema."""
COMPILED_AND_DTYPES = tuple((n, dtype) for n, dtype in BACKENDS_AND_DTYPES if n in _COMPILED)


def operators_of(backend: str) -> Any:
    """Returns the namespace of a compiled backend's operators for CPU tensors."""
    return _COMPILED[backend].operators(torch.device("cpu"))
