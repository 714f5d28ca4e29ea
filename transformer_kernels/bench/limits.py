"""Limits of a machine, measured: the rate of matrix products and the bandwidth of memory.

A call needs at least the time of its matrix products at the one rate, and at least the time of its
memory traffic at the other; the larger of the two is its limit. It does not count exponentials, or
gradients that are recomputed, so that no implementation reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rows import Row
from .timer import clock_for
from .workload import Workload

SIDES = {"cpu": 1536, "cuda": 8192}
"""Side of the square matrices, by type of device: 70 ms in float32 on two cores with AVX2."""

BYTES = {"cpu": 2**27, "cuda": 2**30}
"""Size of the buffer that is read or copied, by type of device: larger than any cache."""

REPEATS = 5


@dataclass(frozen=True)
class Limits:
    """Rates of a device with the threads of the run."""

    tflops: float
    """matrix products of one dtype, 10^12 operations a second"""
    gbytes_s: float
    """memory, 10^9 bytes a second: the faster of a sum, which reads, and of a copy, whose reads and
    writes are both counted"""

    def share(self, row: Row) -> float:
        """Returns the least time of a measured call over its time. It exceeds 1 where the data are
        in a cache, which is faster than memory."""
        return max(self._of_products(row), self._of_traffic(row))

    def binding(self, row: Row) -> str:
        """Returns what limits a call: "products" or "memory"."""
        return "products" if self._of_products(row) >= self._of_traffic(row) else "memory"

    def _of_products(self, row: Row) -> float:
        return row.tflops / self.tflops

    def _of_traffic(self, row: Row) -> float:
        """Keys that no query sees need not be read. At least the share of keys that a query sees on
        average is seen."""
        queries, keys = row.B * row.H_q * row.M, row.B * row.H_kv * row.N  # elements of a column
        read = (queries + row.visible * keys) / (queries + keys)
        return row.gbytes_s * read / self.gbytes_s


def measure_limits(dtype: torch.dtype, device: torch.device) -> Limits:
    """Measures the limits of a device for matrix products in one dtype. Takes a second on a CPU."""
    return Limits(tflops=product_rate(dtype, device) / 1e12, gbytes_s=memory_rate(device) / 1e9)


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the rate of a product of large square matrices, in operations a second."""
    side = SIDES[device.type]
    x, y = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2.0 * side**3 / _least_seconds(lambda: x @ y, device)


def memory_rate(device: torch.device) -> float:
    """Returns the bandwidth of memory in bytes a second."""
    size = BYTES[device.type]
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    reading = size / _least_seconds(source.sum, device)
    copying = 2 * size / _least_seconds(lambda: target.copy_(source), device)
    return max(reading, copying)


def _least_seconds(workload: Workload, device: torch.device) -> float:
    clock = clock_for(device)
    workload()
    laps = [clock.lap(workload) for _ in range(REPEATS)]
    clock.wait()
    return min(lap() for lap in laps)
