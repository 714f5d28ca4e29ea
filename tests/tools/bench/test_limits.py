from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tools.bench.example import row
from transformer_kernels.bench.limits import Limits, measure_limits, memory_rate, product_rate

LIMITS = Limits(tflops=2.0, gbytes_s=100.0)
CALL = replace(
    row(), B=1, H_q=4, H_kv=4, M=64, N=64, D=32, D_v=32, visible=1.0, median_ms=10.0,
    tflops=1.0, gbytes_s=20.0,
)  # fmt: skip


def test_larger_of_both_limits_counts() -> None:
    assert LIMITS.share(CALL) == pytest.approx(0.5)
    assert LIMITS.binding(CALL) == "products"
    reading = replace(CALL, gbytes_s=90.0)
    assert LIMITS.share(reading) == pytest.approx(0.9)
    assert LIMITS.binding(reading) == "memory"


def test_keys_that_no_query_sees_are_not_read() -> None:
    """One query that sees a quarter of the keys: q and o are 1 of 65 rows each."""
    step = replace(CALL, M=1, visible=0.25, tflops=0.0, gbytes_s=65.0)
    assert LIMITS.share(step) == pytest.approx(0.65 * (1 + 0.25 * 64) / 65)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rates_are_those_of_the_machine(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than a loop in Python, smaller than any CPU's."""
    monkeypatch.setattr("transformer_kernels.bench.limits.SIDES", {"cpu": 64})
    monkeypatch.setattr("transformer_kernels.bench.limits.BYTES", {"cpu": 2**16})
    limits = measure_limits(dtype, torch.device("cpu"))
    assert 1e-6 < limits.tflops < 1e3
    assert 1e-2 < limits.gbytes_s < 1e5


def test_fastest_lap_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        laps = iter([3.0, 2.0, 4.0, 2.5, 5.0, 1.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0])

        def lap(self, workload: object) -> object:
            seconds = next(self.laps)
            return lambda: seconds

        def wait(self) -> None:
            pass

    clock = Clock()
    monkeypatch.setattr("transformer_kernels.bench.limits.clock_for", lambda _: clock)
    monkeypatch.setattr("transformer_kernels.bench.limits.SIDES", {"cpu": 10})
    monkeypatch.setattr("transformer_kernels.bench.limits.BYTES", {"cpu": 80})
    cpu = torch.device("cpu")
    assert product_rate(torch.float32, cpu) == 2 * 10**3 / 2.0
    assert memory_rate(cpu) == max(80 / 1.0, 2 * 80 / 4.0)
