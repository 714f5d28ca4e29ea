"""Our kernels and torch's SDPA without AMX, measured in a separate process.

`force_isa` disables AMX in our kernels. SDPA uses three libraries, configured by environment
variables that they read when loaded: ATen, oneDNN and MKL (MKL's bfloat16 product alone would
otherwise still use AMX). For oneDNN the limit is the level just below AMX: without AVX512-FP16 its
float16 products use a reference implementation, 15 times slower, which would be an unfair
comparison. For MKL, AVX512 is faster than AVX512_E3.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from transformer_kernels.bench import (
    Budget,
    Case,
    Direction,
    Outputs,
    Provenance,
    Row,
    usable_variants,
)
from transformer_kernels.bench.contenders import CheckedCase, Expected, check, measure_contenders

ISA = "avx512"
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512",
}
SUFFIX = ", without AMX"
"""Appended to the name of a case."""


@contextmanager
def process_without_amx(threads: int) -> Iterator[Executor]:
    """Starts a worker process in which AMX is disabled.

    Raises:
        ValueError: the CPU or the build lacks AVX-512.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as worker:
        with patch.dict(os.environ, ENVIRONMENT):
            worker.submit(_restrict, threads).result()
        yield worker


def _restrict(threads: int) -> None:
    from transformer_kernels import _C

    _C.force_isa(ISA)
    torch.set_num_threads(threads)


@contextmanager
def saved(expected: Expected) -> Iterator[Path]:
    """Saves the expected outputs for the worker: slow to recompute, too large for some /dev/shm."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "expected.pt"
        torch.save((expected.exact.tensors(), expected.naive.tensors()), path)
        yield path


def rows_without_amx(
    case: Case, expected: Path, *, direction: Direction, provenance: Provenance, budget: Budget
) -> list[Row]:
    """Checks and measures a case; called in the worker.

    `expected` is a file written by `saved`.
    """
    checked = _checked(case, expected)
    measured = measure_contenders(
        checked.contenders(direction),
        provenance=provenance,
        suite="cpu",
        budget=budget,
    )
    return [one.row for one in measured]


def _checked(case: Case, expected: Path) -> CheckedCase:
    exact, naive = (Outputs(**tensors) for tensors in torch.load(expected))
    named = replace(case, name=case.name + SUFFIX)
    return check(named, usable_variants(["sdpa", "cpu"]), Expected(exact, naive))
