"""Clocks that measure one workload, on the CPU and on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from .workload import Workload

Seconds = Callable[[], float]
"""Returns the time of a lap in seconds; valid after `Clock.wait`."""

FLUSH_BYTES = 2**30
"""Size of the buffer that is written before each lap on a device.

It is many times larger than any L2, so that no input is cached. The write takes at least a quarter
of a millisecond, in which the host queues the lap, so that Python's overhead is not measured."""


class Clock(Protocol):
    """Measures workloads."""

    def lap(self, workload: Workload) -> Seconds:
        """Runs the workload once and returns its time, readable after `wait`."""

    def wait(self) -> None:
        """Waits until all laps have completed."""


class CpuClock:
    """Host clock around the call."""

    def lap(self, workload: Workload) -> Seconds:
        start = time.perf_counter()
        result = workload()
        seconds = time.perf_counter() - start
        del result
        return lambda: seconds

    def wait(self) -> None:
        """Does nothing: a CPU call has completed when it returns."""


class CudaClock:
    """CUDA events around the call, on the current stream, after an L2 flush.

    There is no synchronization between laps: all times of a round are read at its end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def lap(self, workload: Workload) -> Seconds:
        stream = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record(stream)
        result = workload()
        end.record(stream)
        del result
        return lambda: start.elapsed_time(end) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    """Returns the clock for workloads on this device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
