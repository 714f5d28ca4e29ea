"""Launch of several gloo processes that run one function of a module."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch import distributed as dist

LIMIT = 300
"""Seconds after which a launch fails."""


def run_processes(
    count: int, function: str, *words: object, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs "module:function" in `count` processes of one thread, started by torchrun.

    The words, as strings, are the function's arguments. `timeout` is that of the process group, in
    seconds.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [sys.executable, *launcher, "-m", __name__, function, str(timeout), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LIMIT, env=environment
    )


def assert_runs(count: int, function: str, *words: object) -> None:
    """Asserts that the function returns in every process."""
    done = run_processes(count, function, *words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"


def main(function: str, timeout: str, *words: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*words)
    dist.barrier()
    time.sleep(0.2)  # as in training.distributed: destroying the group at once can deadlock in gloo
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
