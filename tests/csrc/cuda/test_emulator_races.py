"""The race detector: what nothing orders is reported with both places, and nothing else is."""

from __future__ import annotations

import pytest

from tests.csrc.cuda.emulator_programs import Programs

pytestmark = pytest.mark.exhaustive

RACES = {
    "exchange": ("shared memory", "read", "write"),
    "exchange_far": ("shared memory", "read", "write"),
    "load_matrix": ("shared memory", "read", "write"),
    "load_matrix_transposed": ("shared memory", "read", "write"),
    "copy_over": ("shared memory", "read", "write"),
    "through_global": ("global memory", "read", "write"),
    "atomic_and_plain": ("global memory", "atomic access", "write"),
    "turns": ("global memory", "of block", "write"),
    "turns_without_release": ("global memory", "of block", "write"),
    "last_block": ("global memory", "of block", "write"),
    "sums": ("global memory", "of block", "write"),
}
RIGHT = (
    "exchange_right",
    "exchange_right_too",
    "exchange_far_right",
    "load_matrix_right",
    "load_matrix_transposed_right",
    "copy_over_right",
    "through_global_right",
    "atomics_right",
    "turns_right",
    "last_block_right",
    "sums_right",
    "unordered_sums_right",
    "within_right",
)


@pytest.mark.parametrize("case", RACES)
def test_race_is_named_under_every_schedule(programs: Programs, case: str) -> None:
    for line in programs.run("races", case, races=True):
        assert "race at" in line
        assert all(word in line for word in RACES[case]), line
        assert line.count("at races.cpp:") == 2


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_ordered_is_no_race(programs: Programs, case: str) -> None:
    assert set(programs.run("races", case, races=True)) == {"ok"}


def test_pipelined_product_has_no_race(programs: Programs) -> None:
    assert set(programs.run("product", "right", races=True)) == {"ok"}


@pytest.mark.parametrize(
    "case", ["no_barrier_after_wait", "no_barrier_before_copy", "no_barrier_in_epilogue"]
)
def test_missing_barrier_of_the_product_is_a_race(programs: Programs, case: str) -> None:
    for line in programs.run("product", case, races=True):
        assert "race at byte" in line
        assert line.count("at product.cpp:") == 2


def test_every_byte_behind_shared_memory_is_seen(programs: Programs) -> None:
    for line in programs.run("races", "just_behind", races=True):
        assert "byte 1024 of shared memory, which has 1024" in line


@pytest.mark.parametrize(("case", "what"), [("beyond", "read"), ("beside_y", "write")])
def test_access_beside_what_was_given_is_seen(programs: Programs, case: str, what: str) -> None:
    for line in programs.run("races", case, races=True):
        assert f"{what} of 4 bytes at 0x" in line
        assert "outside of the global memory it was given (races.cpp:" in line
