"""Backends, dtypes and instruction sets that run here.

Importing this file installs the emulator, so that backend="cuda" accepts CPU tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from tests.support import emulator
from transformer_kernels import _C
from transformer_kernels.backends import BACKENDS, CpuBackend, CudaBackend
from transformer_kernels.backends.native.cuda_support import not_built_reason
from transformer_kernels.common import torch_private

SWITCH = "TRANSFORMER_KERNELS_EMULATOR"
"""Environment variable. 0 disables the emulator, so that a GPU runs the kernels."""
NOT_EMULATED = f"{SWITCH} is 0" if os.environ.get(SWITCH) == "0" else emulator.unavailable_reason()
"""The reason why kernels are not emulated, or None."""
if NOT_EMULATED is None:
    emulator.install()

_ELSEWHERE = {"triton": torch.cuda.is_available(), "cuda": NOT_EMULATED is not None}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = tuple(backend.name for backend in BACKENDS if not _ELSEWHERE.get(backend.name))
"""Backends that run on CPU tensors. With a GPU, Triton is not interpreted. The CUDA kernels are
included if the emulator can run them."""


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
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

WITH_FLOAT64 = tuple(name for name in NAMES if torch.float64 in dtypes_of(name))
BACKENDS_AND_DTYPES = tuple((name, dtype) for name in NAMES for dtype in dtypes_of(name))
TRITON_WAYS = tuple(way for way in TABLE_WAYS if way[0] == "triton")
OTHER_WAYS = tuple(way for way in TABLE_WAYS if way[0] != "triton")


def _decoder(name: str, *others: object) -> ParameterSet:
    """Parameters of a test of decoding; exhaustive with Triton, whose interpreter is slow."""
    marks = [pytest.mark.exhaustive] if name == "triton" else []
    return pytest.param(name, *others, marks=marks)


DECODERS = tuple(_decoder(name) for name in NAMES)
DECODERS_AND_DTYPES = tuple(_decoder(name, dtype) for name, dtype in BACKENDS_AND_DTYPES)

_COMPILED = {backend.name: backend for backend in (CpuBackend(), CudaBackend())}
COMPILED_BACKENDS = tuple(name for name in NAMES if name in _COMPILED)
"""Backends of csrc/, whose operators share one schema."""
COMPILED_AND_DTYPES = tuple((n, dtype) for n, dtype in BACKENDS_AND_DTYPES if n in _COMPILED)


def operators_of(backend: str) -> Any:
    """Returns the namespace of a compiled backend's operators for CPU tensors."""
    return _COMPILED[backend].operators(torch.device("cpu"))


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Context manager that selects an instruction set. Raises ValueError if the CPU lacks it."""
    before = _C.isa()
    _C.force_isa(name)
    try:
        yield
    finally:
        _C.force_isa(before)


def _runs(isa: str) -> bool:
    try:
        with forced_isa(isa):
            return True
    except ValueError:
        return False


ISAS = tuple(filter(_runs, _C.built_isas()))
"""Instruction sets that are built and that this CPU has, or that are emulated."""

needs_varlen = pytest.mark.skipif(
    bool(torch_private.MISSING_FOR_VARLEN),
    reason=f"torch {torch.__version__} lacks {', '.join(torch_private.MISSING_FOR_VARLEN)}",
)
not_in_2_11 = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 cannot do this, without us either"
)
