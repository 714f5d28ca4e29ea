"""Several gloo processes, started by torchrun."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from datetime import timedelta

import torch
from torch import distributed as dist

from transformer_kernels.training.distributed import end_process_group

LIMIT = 300
"""Seconds after which a launch fails."""


def torchrun(count: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a script or module, the words of a Python command line, in `count` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run(
        [sys.executable, *launcher, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
    )


def run_processes(
    count: int, function: str, *words: object, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs "module:function" in `count` processes of one thread and one process group.

    The words, as strings, are the function's arguments. `timeout` is that of the process group, in
    seconds.
    """
    return torchrun(count, "-m", __name__, function, str(timeout), *map(str, words))


def assert_runs(count: int, function: str, *words: object) -> None:
    done = run_processes(count, function, *words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"


def main(function: str, timeout: str, *words: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*words)
    end_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
