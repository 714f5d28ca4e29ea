"""Mutation tests: the emulator reports every barrier removed from linear attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.cuda import mutants
from tests.csrc.cuda.mutants import LINEAR, STEPS, Mutant
from tests.support.emulated import NOT_EMULATED

pytestmark = pytest.mark.exhaustive

if NOT_EMULATED is not None:
    pytest.skip(f"needs the emulator: {NOT_EMULATED}", allow_module_level=True)

PLAIN, DECAYED, GROUP = (f"{LINEAR}plain",), (f"{LINEAR}token-decay",), (f"{LINEAR}mqa",)
SEVERAL = (f"{LINEAR}not-normalized",)
SCAN, SUMS, GRADIENT = "scan.cuh", "boundary_states.cuh", "decay_gradient.cuh"


def _mutant(source: str, old: str, new: str, cases: tuple[str, ...], ctas: int = 0) -> Mutant:
    """A mutant of a file of csrc/cuda/linear, in the kernels for the cases."""
    is_steps = cases == (STEPS,)
    return Mutant(
        f"{source}: {old} {cases[0]}".replace("\n", ""),
        f"linear/{source}",
        old,
        new,
        cases,
        "float32" if is_steps else "float16",
        "linear-float-128" if is_steps else "linear-half-64",
        aimed_ctas=ctas,
    )


def _without(source: str, why: str, cases: tuple[str, ...], ctas: int = 0) -> Mutant:
    """A mutant without the barrier that has the comment `why`."""
    return _mutant(source, f"__syncthreads();  // {why}\n", ";\n", cases, ctas)


MUTANTS = (
    _without(SCAN, "the tiles of the previous chunk have been read", PLAIN, ctas=1),
    _without(SCAN, "both are written", DECAYED),
    _without(SCAN, "the tiles of the previous head have been read", GROUP),
    _without(SCAN, "the statistics are written", GROUP),
    _without(SCAN, "the tiles are written", PLAIN),
    _without(SCAN, "c has been read", DECAYED),
    _without(SCAN, "c is scaled", DECAYED),
    _mutant(SCAN, "current_ ^= 1;", ";", DECAYED, ctas=1),
    _without(SUMS, "both are written, and the previous tiles have been read", DECAYED),
    _without(SUMS, "both are written, and the previous tiles have been read", SEVERAL, ctas=6),
    _without(SUMS, "the tiles are written", PLAIN),
    _without(SUMS, "the sums are written", PLAIN),
    _without(GRADIENT, "the products and changes are written", DECAYED),
    _without("steps.cuh", "features and z are written", (STEPS,)),
    _without("steps.cuh", "the parts are written; features and z have been read", (STEPS,)),
)


@pytest.mark.parametrize("variant", ["linear-half-64", "linear-float-128"])
def test_unchanged_kernels_are_right(variant: str, tmp_path: Path) -> None:
    line = "struct ScanArguments {"
    cases = (STEPS,) if variant == "linear-float-128" else (*PLAIN, *DECAYED, *GROUP)
    dtype = "float32" if variant == "linear-float-128" else "float16"
    same = Mutant("unchanged", f"linear/{SCAN}", line, line, cases, dtype, variant)
    mutants.assert_right(same, tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_noticed_under_every_schedule(mutant: Mutant, tmp_path: Path) -> None:
    mutants.assert_noticed(mutant, tmp_path)
