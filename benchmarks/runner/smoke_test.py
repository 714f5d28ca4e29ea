"""Whether a variant comes through a few small cases, in a process of its own: a kernel that hangs
or breaks the device must not take the measuring with it.

`python -m benchmarks.runner.smoke_test VARIANT` runs one, and ends with status 1 if it fails.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks.cases.gpu import causal
from benchmarks.runner.gpu_check import try_out
from benchmarks.runner.record import ROOT
from transformer_kernels.bench import VARIANTS

SECONDS = 60.0
"""For all together; what takes longer hangs. Compiling is most of it"""
LENGTH, WIDTHS = 512, (64, 128)


def why_each_fails(names: Sequence[str]) -> dict[str, str]:
    """Of those that fail, why."""
    commands = {
        name: [sys.executable, "-m", "benchmarks.runner.smoke_test", name] for name in names
    }
    return why_each_command_fails(commands, SECONDS)


def why_each_command_fails(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, str]:
    """They run side by side; the reason is the last line that one prints."""
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
            # Who has ended while another was waited for still has to be heard.
            printed, _ = process.communicate(timeout=max(2.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failing[name] = f"does not end within {seconds:.0f} s"
            continue
        if process.returncode != 0:
            lines = [line for line in printed.splitlines() if line.strip()]
            said = lines[-1].strip() if lines else "nothing"
            failing[name] = f"exit status {process.returncode}: {said}"
    return failing


def main() -> int:
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
