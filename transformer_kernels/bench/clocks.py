"""How long a piece of work takes, on the CPU and on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from transformer_kernels.bench.workload import Work

Seconds = Callable[[], float]
"""A lap's time, once `Clock.wait` has returned"""

FLUSH_BYTES = 2**30
"""Written before each lap on a device. It is many times any L2, whose content is then nobody's
input; and it takes a quarter of a millisecond or more, in which the host gets ahead of the device,
so that a lap is not the time of Python."""


class Clock(Protocol):
    def lap(self, work: Work) -> Seconds:
        """Runs the work once."""

    def wait(self) -> None:
        """Until everything that was started has ended."""


class CpuClock:
    """The host's own clock around the call."""

    def lap(self, work: Work) -> Seconds:
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        del result
        return lambda: seconds

    def wait(self) -> None:
        """A call has ended when it returns."""


class CudaClock:
    """Events on the device's current stream around the call, with L2 flushed before.

    Nothing is waited for between laps: their times are read when all of a round have ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def lap(self, work: Work) -> Seconds:
        stream = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record(stream)
        result = work()
        end.record(stream)
        del result
        return lambda: start.elapsed_time(end) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    """The clock for work on tensors that lie there."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
