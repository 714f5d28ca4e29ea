"""The emulator of sm_90: mbarrier, TMA, wgmma, named barriers, setmaxnreg, and their misuse."""

from __future__ import annotations

import re

import pytest

from tests.kernels.cuda.emulator_programs import Programs

pytestmark = pytest.mark.exhaustive

PRIMITIVES = (
    ("sm90_gemm", "wgmma_widths"),
    ("sm90_gemm", "wgmma_layouts"),
    ("sm90_primitives", "tensor_copies"),
    ("sm90_primitives", "refused_tensor_maps"),
    ("sm90_primitives", "bulk_copies"),
    ("sm90_primitives", "phases"),
    ("sm90_primitives", "registers_and_elect"),
    ("sm90_primitives", "matrix_stores"),
    ("sm90_primitives", "exponentials"),
    ("sm90_schedule", "divisions"),
    ("sm90_schedule", "every_tile_once"),
    ("sm90_schedule", "query_heads_share_key_heads"),
    ("sm90_schedule", "forward_tiles_are_balanced"),
    ("sm90_schedule", "backward_ctas_are_balanced"),
)


@pytest.mark.parametrize(("program", "case"), PRIMITIVES)
def test_primitives_agree_with_scalar_computations(
    programs: Programs, program: str, case: str
) -> None:
    assert set(programs.run(program, case)) == {"ok"}


@pytest.mark.parametrize("races", [False, True])
def test_product_of_three_warpgroups_is_correct(programs: Programs, races: bool) -> None:
    assert set(programs.run("sm90_product", "correct", races=races)) == {"ok"}


DEADLOCK = r"deadlock.*in mbarrier\.try_wait at sm90_product\.cpp:\d+, the mbarrier at byte \d+"
CHANGED = r"wgmma: its operands changed before it was waited for"
OVERRUN = r"expect_tx: more than 1 arrivals"
DEFECTS = {
    "no_empty_wait": OVERRUN,
    "full_parity": rf"{DEADLOCK}|{CHANGED}|{OVERRUN}",
    "empty_parity": DEADLOCK,
    "expects_less": rf"{DEADLOCK}, phase 0: 0 of 1 arrivals and -1024 bytes are missing",
    "expects_more": rf"{DEADLOCK}, phase 0: 0 of 1 arrivals and 1024 bytes are missing",
    "too_few_arrivals": DEADLOCK,
    "too_many_arrivals": rf"{OVERRUN}|{CHANGED}|{DEADLOCK}",
    "no_init_fence": r"no fence since the mbarrier at byte \d+ was initialised",
    "no_wgmma_wait": r"exits before the wgmma at sm90_product\.cpp:\d+ is waited for|deadlock",
    "wgmma_wait_for_one_less": rf"{CHANGED}|deadlock",
    "no_wgmma_fence": r"wgmma: no wgmma\.fence since registers may have changed",
    "no_wgmma_commit": r"exits before the wgmma at sm90_product\.cpp:\d+ is waited for|deadlock",
    "released_early": rf"{CHANGED}|deadlock",
    "registers_in_flight": r"wgmma: its accumulator c\[0\] was written before it was waited for",
    "other_swizzle": r"wgmma: a begins at address \d+, not in the first row of its swizzle pattern",
    "other_stride": r"wrong: c is",
    "other_step": r"wrong: c is",
    "other_descriptor_in_one_warp": r"wgmma: its descriptor of b differs from that of the "
    r"warpgroup's first warp",
    "not_aligned": r"address \d+ of shared memory; its swizzle requires a multiple of 1024",
    "no_store_fence": r"wrong: c is -?nan",
    "no_store_barrier": r"wrong: c is -?nan|its source was changed before the store was waited for",
    "store_barrier_count": r"deadlock.*in bar\.sync at sm90_product\.cpp:\d+, where 128 of 256 "
    r"threads have arrived",
    "no_store_wait": r"exits before the store at sm90_product\.cpp:\d+ has read shared memory",
    "registers_of_one_warp": r"setmaxnreg by only part of the warpgroup",
    "too_many_registers": r"deadlock.*in setmaxnreg\.inc at sm90_product\.cpp:\d+",
    "shared_too_small": r"mbarrier\.init: bytes \d+ to \d+ of shared memory, which has 81952",
}


@pytest.mark.parametrize("case", DEFECTS)
def test_defective_product_is_reported_under_every_schedule(programs: Programs, case: str) -> None:
    for line in programs.run("sm90_product", case):
        assert re.search(DEFECTS[case], line)


# Defects that some schedules hide, and that only the race detector reports under all of them.
RACES = (
    "no_full_wait",
    "no_init_sync",
    "no_wgmma_wait",
    "wgmma_wait_for_one_less",
    "released_early",
    "no_store_fence",
    "store_fence_in_one_warp",
    "no_store_barrier",
)


@pytest.mark.parametrize("case", RACES)
def test_defective_product_has_a_race(programs: Programs, case: str) -> None:
    for line in programs.run("sm90_product", case, races=True):
        assert re.search(r"race at byte \d+ of shared memory|no mbarrier at byte", line)
        assert line.count("at sm90_product.cpp:") == 2 or "no mbarrier" in line


MISUSES = {
    "no_mbarrier": r"mbarrier\.arrive: no mbarrier at byte 8184|no mbarrier at byte \d+",
    "second_init": r"mbarrier\.init: the mbarrier is already initialised",
    "overwritten_mbarrier": r"mbarrier\.arrive: the mbarrier at byte \d+ was overwritten",
    "second_arrival": r"mbarrier\.arrive\.expect_tx: more than 1 arrivals",
    "misaligned_box": r"tensor: byte \d+ of shared memory; must be a multiple of 128",
    "box_past_end": r"tensor: bytes \d+ to \d+ of shared memory, which has 9224",
    "wrong_rank": r"3 coordinates for a tensor of rank 2",
    "column_of_8_bytes": r"column 2 is not aligned to 16 bytes",
    "store_of_ragged_rows": r"rows of 120 bytes; stores need a multiple of 16",
    "store_before_the_first_row": r"cp\.async\.bulk\.tensor: a store at coordinate -8",
    "invalid_tensor_map": r"not a tensor map",
    "bulk_of_12_bytes": r"12 bytes of 0x\w+; must be multiples of 16",
    "exit_before_load_arrives": r"exits before the copy at sm90_misuse\.cpp:\d+ has arrived|"
    r"exits without waiting for the copies that completed on the mbarrier",
    "store_source_changed": r"its source was changed before the store was waited for",
    "store_without_commit": r"exits before the store at sm90_misuse\.cpp:\d+ has read shared",
    "barrier_of_40_threads": r"bar\.sync for 40 threads of 128; must be a multiple of 32",
    "barrier_16": r"bar\.sync: barrier 16; expected 0 to 15",
    "barrier_with_two_counts": r"bar\.sync: barrier 1 for (128|96) threads, but at .* for (128|96)",
    "request_fewer_registers": r"setmaxnreg\.inc to 40: the warp has 255",
    "release_to_more_registers": r"setmaxnreg\.dec to 48: the warp has 40",
    "wgmma_by_one_warp": r"deadlock.*warp 0 in wgmma\.wait_group at sm90_misuse\.cpp:\d+",
    "wgmma_with_divergent_operands": r"wgmma: the operands of lanes 0 and 9 differ",
    "wgmma_with_divergent_scale": r"wgmma: its scale-d differs",
    "wgmma_past_end": r"wgmma: bytes \d+ to \d+ of shared memory, which has 9224",
    "wgmma_inside_swizzle_pattern": r"wgmma: b begins at address \d+, not in the first row",
    "accumulator_scaled_early": r"wgmma: its accumulator c\[3\] was written before",
    "operand_in_registers_reused": CHANGED,
    "operand_in_shared_reused": CHANGED,
    "register_operand_without_fence": r"wgmma: no wgmma\.fence since registers may have changed",
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_an_error_with_its_location(programs: Programs, case: str) -> None:
    for line in programs.run("sm90_misuse", case):
        assert re.search(MISUSES[case], line)
        assert "sm90_misuse.cpp:" in line or "exits without waiting" in line


def test_correct_use_is_not_an_error(programs: Programs) -> None:
    assert set(programs.run("sm90_misuse", "correct")) == {"ok"}


def test_destination_of_a_load_is_poison_until_it_arrives(programs: Programs) -> None:
    assert programs.run("sm90_misuse", "read_before_load", seeds=[0]) == ["wrong: NaN was read"]
