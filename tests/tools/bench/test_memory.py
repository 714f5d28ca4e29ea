from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from transformer_kernels.bench import Case, memory
from transformer_kernels.bench.memory import memory_can_be_measured, peak_extra_bytes
from transformer_kernels.bench.workload import Workload

MIB = 2**20
NOISE = 6 * MIB

linux = pytest.mark.skipif(
    not memory_can_be_measured(), reason="/proc/self/clear_refs cannot be written here"
)


def peak_of(workload: Workload) -> int:
    peak = peak_extra_bytes(lambda: workload)
    assert peak is not None
    return peak


def free_at_once() -> None:
    torch.ones(64 * MIB, dtype=torch.uint8).clone()


def free_in_between() -> None:
    for _ in range(4):
        torch.ones(48 * MIB, dtype=torch.uint8)


def outside_torch() -> None:
    with mmap.mmap(-1, 64 * MIB) as block:
        ctypes.memset((ctypes.c_char * len(block)).from_buffer(block), 1, len(block))


@pytest.mark.quick
@linux
@pytest.mark.parametrize(
    ("work", "expected"), [(free_at_once, 128), (free_in_between, 48), (outside_torch, 64)]
)
def test_every_allocation_counts_until_it_is_freed(work: Workload, expected: int) -> None:
    assert (expected - 6) * MIB < peak_of(work) < (expected + 6) * MIB


@linux
def test_inputs_and_earlier_peaks_do_not_count() -> None:
    x = torch.ones(64 * MIB, dtype=torch.uint8)
    assert peak_of(x.max) < NOISE
    torch.ones(256 * MIB, dtype=torch.uint8)
    assert peak_of(lambda: torch.ones(32 * MIB, dtype=torch.uint8)) < 32 * MIB + NOISE


def test_on_a_device_the_peak_of_the_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the memory after the set-up; the warm-up run is not measured."""
    allocated, peak = 100, 0
    log: list[str] = []

    def prepare() -> Workload:
        nonlocal allocated
        allocated += 1000  # memory of the set-up
        log.append("set up")

        def work() -> None:
            nonlocal peak
            peak = max(peak, allocated + 64)
            log.append("work")

        return work

    def reset(_device: torch.device) -> None:
        nonlocal peak
        peak = allocated
        log.append("reset")

    monkeypatch.setattr("torch.cuda.synchronize", lambda _: log.append("wait"))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: allocated)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: peak)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset)
    assert peak_extra_bytes(prepare, torch.device("cuda")) == 64
    assert log == ["set up", "work", "set up", "wait", "reset", "work", "wait"]


@pytest.mark.parametrize(
    ("available", "fits"), [(5 * 2**30, False), (6 * 2**30, True), (None, True)]
)
def test_naive_attention_larger_than_the_free_memory_has_a_reason(
    available: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    reason = memory.too_large_reason(Case(name="causal", M=6144, N=6144))
    assert (reason is None) == fits
    if reason is not None:
        assert "naive attention needs 5.6 GiB" in reason
