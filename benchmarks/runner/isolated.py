"""Kernels in processes of their own, before the suite `gpu` measures them.

    python -m benchmarks.runner.isolated smoke VARIANT
    python -m benchmarks.runner.isolated compile CASE VARIANT...

`smoke` runs a few small cases, so that a hanging or faulting kernel cannot abort the benchmark.
`compile` runs variants of one case, forward and backward: Triton and torch.compile keep their
kernels on disk, and one after the other they would take more time than the measurements. Both exit
with status 1 if one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.gpu_cases import causal, grid_cases, masked_cases, name_of
from benchmarks.runner import target
from benchmarks.runner.record import ROOT
from transformer_kernels.bench import VARIANTS, run_once
from transformer_kernels.bench.trial import failure_reason, try_out

COMPILED = ("triton", "flex")
"""Variants that are compiled for each case."""
SMOKE_SECONDS = 60.0
"""Time limit of all smoke tests together, mostly compilation; a longer one is considered
hanging."""
DAY = 86_400.0
_COMMAND = (sys.executable, "-m", "benchmarks.runner.isolated")


def smoke_failures(variants: Sequence[str]) -> dict[str, str]:
    """Runs the smoke tests of the named variants and maps each failing one to its reason."""
    commands = [(*_COMMAND, "smoke", name) for name in variants]
    reasons = failures(commands, SMOKE_SECONDS, workers=max(1, len(commands)))
    return {name: why for name, why in zip(variants, reasons, strict=True) if why is not None}


def compile_ahead(names: Sequence[str], variants: Sequence[str], seconds: float) -> None:
    """Compiles the variants of the named cases, the most important case first.

    A case that fails, or that is not compiled in time, is compiled again by the suite, which
    reports the failure.
    """
    commands = [(*_COMMAND, "compile", name, *variants) for name in names]
    failures(commands, seconds, workers=max(1, (os.cpu_count() or 1) - 1))


def failures(
    commands: Sequence[Sequence[str]], seconds: float, *, workers: int
) -> list[str | None]:
    """Runs commands in parallel, in order, and ends them after a time limit.

    Returns:
        None for each command that succeeds; the last line that it printed for one that fails.
    """
    end = time.monotonic() + seconds
    # torch.compile starts this many processes of its own, otherwise one per core.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

    def failure(command: Sequence[str]) -> str | None:
        left = end - time.monotonic()
        if left <= 0:
            return f"not started within {seconds:.0f} s"
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=min(left, DAY), check=False, text=True,
                errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"still running after {seconds:.0f} s"
        if done.returncode == 0:
            return None
        printed = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        return f"exit status {done.returncode}: {printed[-1] if printed else 'no output'}"

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(failure, commands))


def smoke(variant: str) -> str | None:
    """Returns the reason why a variant fails small cases, or None."""
    for width in (64, 128):
        trial = try_out(target.placed(causal(512, width)), [VARIANTS[variant]])
        if target.DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if trial.broken:
            return f"width {width}: {trial.broken[variant]}"
    return None


def compile_case(name: str, *variants: str) -> str | None:
    """Runs variants of a case; returns the reasons of those that fail, or None."""
    masks = dict(zip(map(name_of, masked_cases()), target.placed_masks(), strict=True))
    case = masks.get(name) or next(
        target.placed(one) for one in grid_cases() if name_of(one) == name
    )
    inputs = case.inputs()
    reasons = {
        one: failure_reason(lambda one=one: run_once(VARIANTS[one].attend_for(case), inputs))  # type: ignore[misc]
        for one in variants
    }
    failed = [f"{one}: {reason}" for one, reason in reasons.items() if reason is not None]
    return "; ".join(failed) or None


if __name__ == "__main__":
    target.prepare()
    program, *words = sys.argv[1:]
    sys.exit(smoke(*words) if program == "smoke" else compile_case(*words))
