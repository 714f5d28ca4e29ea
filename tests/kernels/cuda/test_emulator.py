"""The emulator: instructions against scalar computations, and the defects and races it reports.

The C++ programs in programs/ run kernels, correct and defective, under several schedules.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from building.extension import ROOT
from building.ninja import available_cores
from building.tools import find_compiler

pytestmark = pytest.mark.exhaustive

EMULATOR = ROOT / "csrc/emulator"
PROGRAMS = Path(__file__).parent / "programs"
FLAGS = (
    *("-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-pragmas", "-D__CUDA_ARCH__=800"),
    *("-iquote", str(EMULATOR), f"-I{ROOT / 'csrc'}"),
)
SEEDS = range(8)


@dataclass(frozen=True)
class Programs:
    """Test programs, built in `folder`, which several processes may share."""

    folder: Path
    compiler: tuple[str, ...]

    def run(
        self, program: str, case: str = "all", *, seeds: Sequence[int] = SEEDS, races: bool = False
    ) -> list[str]:
        """Runs a program. Returns a line for each seed: "ok", or a case with its error."""
        command = [str(self._program(program, races)), case, *(("races",) if races else ())]
        result = subprocess.run(
            [*command, *map(str, seeds)], capture_output=True, text=True, check=False, timeout=120
        )
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert len(lines) == len(seeds), result.stdout
        return lines

    def _program(self, name: str, races: bool) -> Path:
        path = self.folder / (f"{name}-races" if races else name)
        with _one_at_a_time(path):
            if not path.exists():
                objects = self._emulator()
                own = self._compile(PROGRAMS / f"{name}.cpp", f"{path.name}.o", races)
                self._call([*map(str, (own, *objects)), "-ldl", "-o", f"{path}.new"])
                Path(f"{path}.new").rename(path)
        return path

    def _emulator(self) -> list[Path]:
        """Objects of the emulator, which are not instrumented: only kernels can race."""
        sources = sorted(EMULATOR.glob("*.cpp"))
        objects = [self.folder / f"emulator-{source.stem}.o" for source in sources]
        with (
            _one_at_a_time(self.folder / "emulator"),
            ThreadPoolExecutor(available_cores()) as pool,
        ):
            if not all(path.exists() for path in objects):
                list(pool.map(self._compile, sources, [path.name for path in objects]))
        return objects

    def _compile(self, source: Path, name: str, races: bool = False) -> Path:
        path = self.folder / name
        flags = (*FLAGS, *(("-fsanitize=thread",) if races else ()))
        self._call([*flags, "-c", str(source), "-o", str(path)])
        return path

    def _call(self, arguments: Sequence[str]) -> None:
        command = [*self.compiler, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The programs, each built at its first use."""
    if not (compiler := find_compiler(os.environ)):
        pytest.skip("needs a C++ compiler on PATH")
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist share the parent of their temporary folders.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder: Path = shared / "emulator"
    folder.mkdir(exist_ok=True)
    return Programs(folder, compiler)


@pytest.mark.parametrize(
    "program", ["decode_schedule", "primitives", "sm90_gemm", "sm90_primitives"]
)
def test_results_equal_scalar_computations(programs: Programs, program: str) -> None:
    assert set(programs.run(program)) == {"ok"}


def test_schedules_on_an_h200_are_balanced(programs: Programs) -> None:
    """The program runs no kernel: the order of threads does not matter."""
    assert programs.run("sm90_schedule", seeds=[0]) == ["ok"]


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("program", ["product", "sm90_product"])
def test_pipelined_product_is_correct(programs: Programs, program: str, races: bool) -> None:
    assert set(programs.run(program, races=races)) == {"ok"}


def pairs(table: Mapping[str, Mapping[str, object] | Sequence[str]]) -> list[tuple[str, str]]:
    return [(program, case) for program, cases in table.items() for case in cases]


DEADLOCK = r"deadlock.*in mbarrier\.try_wait at sm90_product\.cpp:\d+, the mbarrier at byte \d+"
CHANGED = r"wgmma: its operands changed before it was waited for"
OVERRUN = r"expect_tx: more than 1 arrivals"
SM80_DEFECTS = {
    "no_wait": "wrong: c is -?nan",
    "wait_for_one_less": "wrong: c is -?nan",
    "no_commit": "wrong: c is -?nan",
    "no_barrier_after_wait": "wrong: c is -?nan",
    "no_barrier_before_copy": "wrong: c is",
    "other_swizzle": "wrong: c is",
    "no_barrier_in_epilogue": "wrong: c is",
    "no_shuffle": "wrong: the sum of a row is",
    "no_tail_mask": "wrong: c is",
}
SM90_DEFECTS = {
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
DEFECTS = {"product": SM80_DEFECTS, "sm90_product": SM90_DEFECTS}
"""The error under every schedule."""


@pytest.mark.parametrize(("program", "defect"), pairs(DEFECTS))
def test_defective_product_is_an_error(programs: Programs, program: str, defect: str) -> None:
    for line in programs.run(program, f"product:{defect}"):
        assert re.search(DEFECTS[program][defect], line)


RACY_DEFECTS = {
    "product": ("no_barrier_after_wait", "no_barrier_before_copy", "no_barrier_in_epilogue"),
    "sm90_product": (
        "no_full_wait",
        "no_init_sync",
        "no_wgmma_wait",
        "wgmma_wait_for_one_less",
        "released_early",
        "no_store_fence",
        "store_fence_in_one_warp",
        "no_store_barrier",
    ),
}
"""Some schedules hide those of sm90; the race detector reports them under all."""


@pytest.mark.parametrize(("program", "defect"), pairs(RACY_DEFECTS))
def test_defective_product_has_a_race(programs: Programs, program: str, defect: str) -> None:
    for line in programs.run(program, f"product:{defect}", races=True):
        no_mbarrier = program == "sm90_product" and "no mbarrier at byte" in line
        assert "race at byte" in line or no_mbarrier
        assert line.count(f"at {program}.cpp:") == 2 or no_mbarrier


def test_a_seed_repeats_its_run_and_others_differ(programs: Programs) -> None:
    lines = programs.run("product", "product:no_barrier_before_copy")
    assert lines == programs.run("product", "product:no_barrier_before_copy")
    assert len(set(lines)) > 2


SM80_MISUSES = {
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
    "syncwarp_after_half_exited": r"__syncwarp for lanes ffffffff, of which 0000ffff have exited",
    "endless_loop": r"thread 0: has not yielded for 1 s",
}
SM90_MISUSES = {
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
    "read_before_load": "^read_before_load: wrong: NaN was read$",
}
MISUSES = {"misuse": SM80_MISUSES, "sm90_misuse": SM90_MISUSES}
"""Messages, which name the source line of each side that waits."""
ONE_SCHEDULE = ("syncwarp_after_half_exited", "endless_loop", "read_before_load")


@pytest.mark.parametrize(("program", "case"), pairs(MISUSES))
def test_misuse_is_an_error_with_its_location(programs: Programs, program: str, case: str) -> None:
    for line in programs.run(program, case, seeds=[0] if case in ONE_SCHEDULE else SEEDS):
        assert re.search(MISUSES[program][case], line)
        if program == "sm90_misuse" and case != "read_before_load":
            assert "sm90_misuse.cpp:" in line or "exits without waiting" in line


@pytest.mark.parametrize(
    ("program", "case"),
    [("misuse", "correct"), ("misuse", "correct_after_errors"), ("sm90_misuse", "correct")],
)
def test_correct_use_is_not_an_error(programs: Programs, program: str, case: str) -> None:
    """Also after an error."""
    assert set(programs.run(program, case)) == {"ok"}


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


OUTSIDE = {
    "read_past_end": ("byte 1024 of shared memory, which has 1024",),
    "read_outside": (
        "read of 4 bytes at 0x",
        "outside of the global memory of this call (races.cpp:",
    ),
    "write_outside": (
        "write of 4 bytes at 0x",
        "outside of the global memory of this call (races.cpp:",
    ),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_access_outside_of_memory_is_reported(programs: Programs, case: str) -> None:
    for line in programs.run("races", case, races=True):
        assert all(words in line for words in OUTSIDE[case])
