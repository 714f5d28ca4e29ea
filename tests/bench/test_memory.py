from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from transformer_kernels.bench.memory import memory_can_be_measured, peak_extra_bytes
from transformer_kernels.bench.work import Work

MIB = 2**20
NOISE = 6 * MIB

pytestmark = pytest.mark.skipif(
    not memory_can_be_measured(), reason="/proc/self/clear_refs cannot be written here"
)


def peak_of(work: Work) -> int:
    peak = peak_extra_bytes(lambda: work)
    assert peak is not None
    return peak


def test_memory_that_is_freed_before_the_end_counts() -> None:
    def work() -> None:
        torch.ones(64 * MIB, dtype=torch.uint8).clone()

    assert 128 * MIB - NOISE < peak_of(work) < 128 * MIB + NOISE


def test_one_after_another_is_the_largest_and_not_the_sum() -> None:
    def work() -> None:
        for _ in range(4):
            torch.ones(48 * MIB, dtype=torch.uint8)

    assert 48 * MIB - NOISE < peak_of(work) < 48 * MIB + NOISE


def test_memory_from_outside_torch_counts() -> None:
    def work() -> None:
        with mmap.mmap(-1, 64 * MIB) as block:
            ctypes.memset((ctypes.c_char * len(block)).from_buffer(block), 1, len(block))

    assert 64 * MIB - NOISE < peak_of(work) < 64 * MIB + NOISE


def test_inputs_do_not_count() -> None:
    x = torch.ones(64 * MIB, dtype=torch.uint8)
    assert peak_of(x.max) < NOISE


def test_an_earlier_higher_peak_does_not_count() -> None:
    torch.ones(256 * MIB, dtype=torch.uint8)
    assert peak_of(lambda: torch.ones(32 * MIB, dtype=torch.uint8)) < 32 * MIB + NOISE
