"""The emulator of sm_80: each instruction against plain maths, and misuse that it reports."""

from __future__ import annotations

import re

import pytest

from tests.csrc.cuda.emulator_programs import Programs

pytestmark = pytest.mark.exhaustive

PRIMITIVES = (
    "shuffles",
    "barriers_and_atomics",
    "grids",
    "turns",
    "matrix_loads",
    "matrix_loads_transposed",
    "products_half",
    "products_bfloat16",
    "conversions_half",
    "conversions_bfloat16",
    "numbers",
)


@pytest.mark.parametrize("case", PRIMITIVES)
def test_primitives_agree_with_plain_maths(programs: Programs, case: str) -> None:
    assert set(programs.run("primitives", case)) == {"ok"}


BROKEN = {
    "no_wait": "c is -?nan",
    "wait_for_one_less": "c is -?nan",
    "no_commit": "c is -?nan",
    "no_barrier_after_wait": "c is -?nan",
    "no_barrier_before_copy": "c is",
    "other_swizzle": "c is",
    "no_barrier_in_epilogue": "c is",
    "no_shuffle": "the sum of a row is",
    "no_tail_mask": "c is",
}


def test_pipelined_product_is_right(programs: Programs) -> None:
    assert set(programs.run("product", "right")) == {"ok"}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_product_is_wrong_under_every_schedule(programs: Programs, case: str) -> None:
    for line in programs.run("product", case):
        assert re.match(f"wrong: {BROKEN[case]}", line)


# A line of the kernel is a site: the message must name where each side waits.
MISUSES = {
    "divergent_syncwarp": r"(shuffle|__syncwarp) for lanes ffffffff, but lanes (0000ffff|ffff0000) "
    r"of the warp wait in (shuffle|__syncwarp) for lanes ffffffff at misuse\.cpp:\d+",
    "syncwarp_after_exit": r"waited for in __syncwarp at misuse\.cpp:\d+|of which .* have exited",
    "missing_lane": r"deadlock.*in shuffle at misuse\.cpp:\d+ for lanes ffffffff"
    r".*in __syncthreads at misuse\.cpp:\d+, where 4 of 128 threads have come",
    "lane_outside": r"misuse\.cpp:\d+: shuffle: lane 15 reads lane 16, which takes no part",
    "not_its_own_lane": r"__syncwarp for lanes 0000ffff, not its own",
    "mma_in_part_of_a_warp": r"waited for in mma at misuse\.cpp:\d+|of which .* have exited",
    "two_places": r"shuffle for lanes ffffffff, but lanes .* wait in shuffle",
    "barrier_without_a_warp": r"deadlock.*warp 0, 1, 2 in __syncthreads at misuse\.cpp:\d+, "
    r"where 96 of 128 threads have come\|  warp 3 exited",
    "barrier_against_syncwarp": r"deadlock.*warp 1 lanes 00000010 in __syncwarp",
    "store_behind": r"wrote outside of its 2048 bytes|byte \d+ of shared memory, which has 2048",
    "store_before": r"wrote outside of its 2048 bytes",
    "read_far_behind": r"byte 8\d+ of shared memory, which has 2048",
    "copy_behind": r"misuse\.cpp:\d+: cp\.async: bytes \d+ to \d+ of shared memory, which has 2048",
    "copy_misaligned": r"cp\.async: byte \d+ of shared memory; must be a multiple of 16",
    "copy_from_misaligned": r"cp\.async: reads 0x\w+; must be a multiple of 16",
    "copy_not_to_shared": r"cp\.async: 0x\w+ is not in shared memory",
    "copy_from_what_changes": r"cp\.async: its source 0x\w+ was written before the copy was waited",
    "load_misaligned": r"ldmatrix: byte \d+ of shared memory; must be a multiple of 16",
    "load_behind": r"ldmatrix: bytes 2048 to 2064 of shared memory, which has 2048",
    "never_its_turn": r"deadlock.*warp 0, 1, 2, 3 in load_acquire at misuse\.cpp:\d+",
    "null_pointer": r"address 0x0, where there is no memory",
    "large_locals": r"more than 131072 bytes of local variables",
    "division_by_zero": r"divides by zero",
    "misaligned_atomic": r"atomic: address 0x\w+; must be a multiple of 4",
    "threads_not_of_warps": r"100 threads; must be a multiple of 32",
    "empty_grid": r"a grid of 1 x 0 x 1 blocks",
    "too_much_shared_memory": r"233472 bytes of shared memory; at most 232448",
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_an_error_that_says_where(programs: Programs, case: str) -> None:
    for line in programs.run("misuse", case):
        assert re.search(MISUSES[case], line)


def test_lanes_that_have_exited_are_not_waited_for(programs: Programs) -> None:
    (line,) = programs.run("misuse", "syncwarp_after_half_exited", seeds=[0])
    assert re.search(r"__syncwarp for lanes ffffffff, of which 0000ffff have exited", line)


def test_endless_loop_is_an_error(programs: Programs) -> None:
    (line,) = programs.run("misuse", "endless_loop", seeds=[0])
    assert "thread 0: has not let another thread run for 1 s" in line


@pytest.mark.parametrize("case", ["right", "right_after_errors"])
def test_after_an_error_the_next_launch_is_right(programs: Programs, case: str) -> None:
    assert set(programs.run("misuse", case)) == {"ok"}


def test_same_seed_gives_the_same_run(programs: Programs) -> None:
    case = "no_barrier_before_copy"
    assert programs.run("product", case) == programs.run("product", case)


def test_seeds_give_different_runs(programs: Programs) -> None:
    assert len(set(programs.run("product", "no_barrier_before_copy"))) > 2
