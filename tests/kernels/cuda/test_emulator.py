"""The emulator of sm_80: instructions against scalar computations, and the misuse it reports."""

from __future__ import annotations

import re

import pytest

from tests.kernels.cuda.emulator_programs import Programs

pytestmark = pytest.mark.exhaustive

PRIMITIVES = (
    "shuffles",
    "barriers_and_atomics",
    "grids",
    "semaphores",
    "matrix_loads",
    "matrix_loads_transposed",
    "products_half",
    "products_bfloat16",
    "conversions_half",
    "conversions_bfloat16",
    "known_values",
)


@pytest.mark.parametrize("case", PRIMITIVES)
def test_primitives_agree_with_scalar_computations(programs: Programs, case: str) -> None:
    assert set(programs.run("primitives", case)) == {"ok"}


DEFECTS = {
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


def test_pipelined_product_is_correct(programs: Programs) -> None:
    assert set(programs.run("product", "correct")) == {"ok"}


@pytest.mark.parametrize("case", DEFECTS)
def test_defective_product_is_wrong_under_every_schedule(programs: Programs, case: str) -> None:
    for line in programs.run("product", case):
        assert re.match(f"wrong: {DEFECTS[case]}", line)


# Expected messages. They name the source line of each side that waits.
MISUSES = {
    "divergent_syncwarp": r"(shuffle|__syncwarp) for lanes ffffffff, but lanes (0000ffff|ffff0000) "
    r"of the warp wait in (shuffle|__syncwarp) for lanes ffffffff at misuse\.cpp:\d+",
    "syncwarp_after_exit": r"waited for in __syncwarp at misuse\.cpp:\d+|of which .* have exited",
    "missing_lane": r"deadlock.*in shuffle at misuse\.cpp:\d+ for lanes ffffffff"
    r".*in __syncthreads at misuse\.cpp:\d+, where 4 of 128 threads have arrived",
    "lane_outside_mask": r"misuse\.cpp:\d+: shuffle: lane 15 reads lane 16, which is not in the "
    r"lane mask",
    "mask_without_own_lane": r"__syncwarp for lanes 0000ffff, which do not include its own",
    "mma_by_part_of_a_warp": r"waited for in mma at misuse\.cpp:\d+|of which .* have exited",
    "shuffle_at_two_sites": r"shuffle for lanes ffffffff, but lanes .* wait in shuffle",
    "barrier_missing_a_warp": r"deadlock.*warp 0, 1, 2 in __syncthreads at misuse\.cpp:\d+, "
    r"where 96 of 128 threads have arrived\|  warp 3 exited",
    "barrier_and_syncwarp": r"deadlock.*warp 1 lanes 00000010 in __syncwarp",
    "store_past_end": r"wrote outside of its 2048 bytes|byte \d+ of shared memory, which has 2048",
    "store_before_begin": r"wrote outside of its 2048 bytes",
    "read_far_past_end": r"byte 8\d+ of shared memory, which has 2048",
    "copy_past_end": r"misuse\.cpp:\d+: cp\.async: bytes \d+ to \d+ of shared memory, which has "
    r"2048",
    "copy_misaligned": r"cp\.async: byte \d+ of shared memory; must be a multiple of 16",
    "copy_from_misaligned": r"cp\.async: reads 0x\w+; must be a multiple of 16",
    "copy_not_to_shared": r"cp\.async: 0x\w+ is not in shared memory",
    "copy_source_changed": r"cp\.async: its source 0x\w+ was written before the copy was waited",
    "load_misaligned": r"ldmatrix: byte \d+ of shared memory; must be a multiple of 16",
    "load_past_end": r"ldmatrix: bytes 2048 to 2064 of shared memory, which has 2048",
    "semaphore_never_released": r"deadlock.*warp 0, 1, 2, 3 in load_acquire at misuse\.cpp:\d+",
    "null_pointer": r"access to unmapped address 0x0",
    "large_locals": r"stack overflow: more than 131072 bytes of local variables",
    "division_by_zero": r"division by zero",
    "misaligned_atomic": r"atomic: address 0x\w+; must be a multiple of 4",
    "partial_warp": r"100 threads; expected a multiple of 32",
    "empty_grid": r"invalid grid of 1 x 0 x 1 blocks",
    "too_much_shared_memory": r"233472 bytes of shared memory; at most 232448",
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_an_error_with_its_location(programs: Programs, case: str) -> None:
    for line in programs.run("misuse", case):
        assert re.search(MISUSES[case], line)


def test_syncwarp_with_exited_lanes_is_an_error(programs: Programs) -> None:
    (line,) = programs.run("misuse", "syncwarp_after_half_exited", seeds=[0])
    assert re.search(r"__syncwarp for lanes ffffffff, of which 0000ffff have exited", line)


def test_endless_loop_is_an_error(programs: Programs) -> None:
    (line,) = programs.run("misuse", "endless_loop", seeds=[0])
    assert "thread 0: has not yielded for 1 s" in line


@pytest.mark.parametrize("case", ["correct", "correct_after_errors"])
def test_launch_after_an_error_is_correct(programs: Programs, case: str) -> None:
    assert set(programs.run("misuse", case)) == {"ok"}


def test_same_seed_repeats_a_run(programs: Programs) -> None:
    case = "no_barrier_before_copy"
    assert programs.run("product", case) == programs.run("product", case)


def test_different_seeds_give_different_runs(programs: Programs) -> None:
    assert len(set(programs.run("product", "no_barrier_before_copy"))) > 2
