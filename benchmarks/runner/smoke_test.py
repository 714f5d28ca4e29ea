"""Smoke test of a variant in a subprocess, so that a hanging or faulting kernel cannot abort the
benchmark.

    python -m benchmarks.runner.smoke_test VARIANT

runs a few small cases and exits with status 1 if one fails.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks.cases.gpu import causal
from benchmarks.runner.record import ROOT
from transformer_kernels.bench import VARIANTS
from transformer_kernels.bench.trial import try_out

SECONDS = 60.0
"""Time limit of all variants together, mostly compilation; a longer one is considered hanging."""
LENGTH, WIDTHS = 512, (64, 128)


def failure_reasons(names: Sequence[str]) -> dict[str, str]:
    """Runs the smoke tests of the named variants and maps each failing one to its reason."""
    commands = {
        name: [sys.executable, "-m", "benchmarks.runner.smoke_test", name] for name in names
    }
    return command_failure_reasons(commands, SECONDS)


def command_failure_reasons(
    commands: Mapping[str, Sequence[str]], seconds: float
) -> dict[str, str]:
    """Runs commands in parallel and maps each failing one to its reason: the last line it printed.

    Args:
        commands: command lines by name.
        seconds: time limit of all commands together.
    """
    end = time.monotonic() + seconds
    running = {
        name: subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )
        for name, command in commands.items()
    }  # fmt: skip
    failing = {}
    for name, process in running.items():
        try:
            # At least 2 s: an earlier wait may have used up the time of a process that has ended.
            printed, _ = process.communicate(timeout=max(2.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failing[name] = f"still running after {seconds:.0f} s"
            continue
        if process.returncode != 0:
            lines = [line for line in printed.splitlines() if line.strip()]
            last_line = lines[-1].strip() if lines else "no output"
            failing[name] = f"exit status {process.returncode}: {last_line}"
    return failing


def main() -> int:
    """Runs the smoke test of the variant named on the command line."""
    variant = VARIANTS[sys.argv[1]]
    for width in WIDTHS:
        trial = try_out(causal(LENGTH, width).to(torch.device("cuda")), [variant])
        torch.cuda.synchronize()
        if trial.broken:
            print(f"width {width}: {trial.broken[variant.name]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
