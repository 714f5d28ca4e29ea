"""Compilation of the cases of the suite `gpu` before their measurement, in parallel processes.

Triton and torch.compile keep their kernels on disk. Compiled by the suite itself, one case after
the other, they would take more time than the measurements.

    python -m benchmarks.runner.compile_ahead CASE VARIANT...

runs variants of one case, forward and backward, and exits with status 1 if one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.cases.gpu import grid_cases, masked_cases, name_of
from benchmarks.runner.record import ROOT
from transformer_kernels.bench import VARIANTS, run_once
from transformer_kernels.bench.trial import failure_reason

COMPILED = ("triton", "flex")
"""Variants that are compiled for each case."""


def compile_ahead(names: Sequence[str], variants: Sequence[str], seconds: float) -> int:
    """Compiles the variants of the named cases, each case in a process of its own.

    A case that fails, or that is not compiled in time, is compiled again by the suite, which
    reports the failure.

    Args:
        names: names of cases, the most important first.
        variants: names of variants.
        seconds: time limit.

    Returns:
        The number of cases whose variants were all compiled.
    """
    command = [sys.executable, "-m", "benchmarks.runner.compile_ahead"]
    return run_in_time([[*command, name, *variants] for name in names], seconds)


def run_in_time(commands: Sequence[Sequence[str]], seconds: float) -> int:
    """Runs commands in parallel, in order, and ends them after a time limit.

    Returns:
        The number of commands that succeeded.
    """
    end = time.monotonic() + seconds
    # torch.compile starts this many processes of its own, otherwise one per core.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

    def succeeds(command: Sequence[str]) -> bool:
        left = end - time.monotonic()
        if left <= 0:
            return False
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=left, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1)) as pool:
        return sum(pool.map(succeeds, commands))


def main() -> int:
    """Compiles the case and the variants named on the command line."""
    name, *variants = sys.argv[1:]
    (case,) = (one for one in [*masked_cases(), *grid_cases()] if name_of(one) == name)
    case = case.to(torch.device("cuda"))
    inputs = case.inputs()
    failed = False
    for variant in variants:

        def attempt(variant: str = variant) -> None:
            run_once(VARIANTS[variant].attend_for(case), inputs)

        reason = failure_reason(attempt)
        if reason is not None:
            print(f"{variant}: {reason}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
