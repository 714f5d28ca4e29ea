"""Runs of the emulated CUDA kernels under several orders of threads, and with race detection."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from building.emulated import Emulation
from tests.support import emulator

LARGE, SMALL, RACES = Emulation(), Emulation(arch=860), Emulation(races=True)


def assert_same_bits(run: Callable[[], Mapping[str, Tensor]], schedules: int) -> None:
    """Asserts that the results are bitwise equal under every schedule."""
    runs = []
    for seed in range(schedules):
        with emulator.schedule(seed):
            runs.append(run())
    for other in runs[1:]:
        assert all(torch.equal(other[name], value) for name, value in runs[0].items())


def assert_no_races(run: Callable[[], object], schedules: int = 2, chip: int = 80) -> None:
    """Runs kernels that raise an error for unordered accesses to the same address, and for those
    outside of the tensors of the call."""
    for seed in range(schedules):
        with emulator.emulation(RACES), emulator.chip(chip), emulator.schedule(seed):
            run()
