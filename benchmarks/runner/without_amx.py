"""Ours and torch's SDPA without the CPU's matrix unit, in a process of its own.

Ours is told so by `force_isa`. What SDPA is made of has three libraries to tell, by variables that
they read when they are loaded: ATen, oneDNN and MKL, whose bfloat16 product alone would go on using
the unit. For oneDNN everything below AMX is left in: without AVX512-FP16 its float16 products fall
to a reference implementation, 15 times slower, and would be no match. For MKL its plain AVX-512 is
faster than what its AVX512_E3 chooses.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from benchmarks.runner.measure import CheckedCase, Truth, check, measured_rows
from transformer_kernels.bench import (
    Budget,
    Case,
    Direction,
    Outputs,
    Provenance,
    Row,
    usable_variants,
)

ISA = "avx512"
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512",
}
SUFFIX = ", without AMX"
"""To a case's name"""


@contextmanager
def process_without_amx(threads: int) -> Iterator[Executor]:
    """One worker that calls functions with everything restricted.

    ValueError where this CPU or build lacks AVX-512.
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
def saved(truth: Truth) -> Iterator[Path]:
    """A file for the worker: the truth is slow to find again, and too large for some /dev/shm."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "truth.pt"
        torch.save((truth.exact.tensors(), truth.naive.tensors()), path)
        yield path


def rows_without_amx(
    case: Case, truth: Path, *, direction: Direction, provenance: Provenance, budget: Budget
) -> list[Row]:
    """Called in the worker."""
    checked = _checked(case, truth)
    return measured_rows(
        checked.contenders(direction),
        provenance=provenance,
        suite="cpu",
        budget=budget,
        repeat=_repeat,
    )


def _repeat(round_: Callable[[], None], rounds: int) -> None:
    for _ in range(rounds):
        round_()


def _checked(case: Case, truth: Path) -> CheckedCase:
    exact, naive = (Outputs(**tensors) for tensors in torch.load(truth))
    named = replace(case, name=case.name + SUFFIX)
    return check(named, usable_variants(["sdpa", "cpu"]), Truth(exact, naive))
