"""The race detector reports each data race with both source lines, and has no false positives."""

from __future__ import annotations

import pytest

from tests.kernels.cuda.emulator_programs import Programs

pytestmark = pytest.mark.exhaustive

RACES = {
    "exchange": ("shared memory", "read", "write"),
    "exchange_far": ("shared memory", "read", "write"),
    "load_matrix": ("shared memory", "read", "write"),
    "load_matrix_transposed": ("shared memory", "read", "write"),
    "copy_over": ("shared memory", "read", "write"),
    "through_global": ("global memory", "read", "write"),
    "atomic_and_plain": ("global memory", "atomic access", "write"),
    "semaphore_without_wait": ("global memory", "of block", "write"),
    "semaphore_without_release": ("global memory", "of block", "write"),
    "last_block": ("global memory", "of block", "write"),
    "sums": ("global memory", "of block", "write"),
}
ORDERED = (
    "exchange_with_syncwarp",
    "exchange_with_syncthreads",
    "exchange_far_with_syncthreads",
    "load_matrix_with_syncwarp",
    "load_matrix_transposed_with_syncwarp",
    "copy_over_with_syncthreads",
    "through_global_with_syncthreads",
    "atomics",
    "semaphore",
    "last_block_with_fences",
    "sums_in_order",
    "sums_with_any_order_allowed",
    "read_inside",
)


@pytest.mark.parametrize("case", RACES)
def test_race_is_reported_under_every_schedule(programs: Programs, case: str) -> None:
    for line in programs.run("races", case, races=True):
        assert "race at" in line
        assert all(word in line for word in RACES[case]), line
        assert line.count("at races.cpp:") == 2


@pytest.mark.parametrize("case", ORDERED)
def test_ordered_accesses_are_not_a_race(programs: Programs, case: str) -> None:
    assert set(programs.run("races", case, races=True)) == {"ok"}


def test_pipelined_product_has_no_race(programs: Programs) -> None:
    assert set(programs.run("product", "correct", races=True)) == {"ok"}


@pytest.mark.parametrize(
    "case", ["no_barrier_after_wait", "no_barrier_before_copy", "no_barrier_in_epilogue"]
)
def test_product_with_a_missing_barrier_has_a_race(programs: Programs, case: str) -> None:
    for line in programs.run("product", case, races=True):
        assert "race at byte" in line
        assert line.count("at product.cpp:") == 2


def test_read_past_the_end_of_shared_memory_is_reported(programs: Programs) -> None:
    for line in programs.run("races", "read_past_end", races=True):
        assert "byte 1024 of shared memory, which has 1024" in line


@pytest.mark.parametrize(("case", "access"), [("read_outside", "read"), ("write_outside", "write")])
def test_access_outside_of_the_extents_is_reported(
    programs: Programs, case: str, access: str
) -> None:
    for line in programs.run("races", case, races=True):
        assert f"{access} of 4 bytes at 0x" in line
        assert "outside of the global memory of this call (races.cpp:" in line
