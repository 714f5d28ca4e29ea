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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from benchmarks.runner.run import Run
from transformer_kernels.bench import (
    Budget,
    Case,
    Direction,
    Outputs,
    Provenance,
    Row,
    usable_variants,
)
from transformer_kernels.bench.contenders import Expected, check, measure_contenders

ISA = "avx512"
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512",
}
SUFFIX = ", without AMX"
"""Appended to the name of a case."""


def measure_without_amx(
    case: Case, expected: Expected, direction: Direction, run: Run, suite: str
) -> list[Row]:
    """Checks and measures a case in a process in which AMX is disabled.

    The expected outputs go through a file: they are slow to recompute, and too large for some
    /dev/shm.

    Raises:
        AssertionError: a result is wrong.
        ValueError: the CPU or the build lacks AVX-512.
    """
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=spawn) as worker:
        path = Path(folder) / "expected.pt"
        torch.save((expected.exact.tensors(), expected.naive.tensors()), path)
        with patch.dict(os.environ, ENVIRONMENT):
            worker.submit(restrict, torch.get_num_threads()).result()
        return worker.submit(
            _measure, case, path, direction, run.provenance, run.share(0.5), suite
        ).result()


def restrict(threads: int) -> str:
    """Disables AMX in this process; returns the instruction set of the kernels."""
    from transformer_kernels import _C

    _C.force_isa(ISA)
    torch.set_num_threads(threads)
    return _C.isa()


def _measure(
    case: Case, path: Path, direction: Direction, provenance: Provenance, budget: Budget, suite: str
) -> list[Row]:
    exact, naive = (Outputs(**tensors) for tensors in torch.load(path))
    named = replace(case, name=case.name + SUFFIX)
    checked = check(named, usable_variants(["sdpa", "cpu"]), Expected(exact, naive))
    measured = measure_contenders(
        checked.contenders(direction), provenance=provenance, suite=suite, budget=budget
    )
    return [one.row for one in measured]
