"""Mutation tests: the emulator reports every barrier, wait, fence or bound that a kernel lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.cuda.mutants import Mutant, outcomes, read_mutants
from tests.support.backends import NOT_EMULATED
from tests.support.tiers import each

MUTANTS = read_mutants()


def unchanged(mutants: list[Mutant]) -> Mutant:
    """The kernels of a unit as they are, with all cases of its mutants."""
    first, cases = mutants[0], (case for mutant in mutants for case in mutant.cases)
    return replace(first, name="unchanged", new=first.old, cases=tuple(dict.fromkeys(cases)))


UNITS = {
    unit: unchanged([one for one in MUTANTS if one.variant == unit])
    for unit in sorted({one.variant for one in MUTANTS})
}
emulated = pytest.mark.skipif(
    NOT_EMULATED is not None, reason=f"needs the emulator: {NOT_EMULATED}"
)


@each("mutant", MUTANTS, ids=str)
def test_mutant_changes_its_source(mutant: Mutant) -> None:
    assert mutant.text != mutant.original


@pytest.mark.exhaustive
@emulated
@pytest.mark.parametrize("unit", UNITS)
def test_unchanged_kernels_are_right(unit: str, tmp_path: Path) -> None:
    assert set(outcomes(UNITS[unit], tmp_path)) == {"ok"}


@pytest.mark.exhaustive
@emulated
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_noticed_under_every_schedule(mutant: Mutant, tmp_path: Path) -> None:
    assert "ok" not in outcomes(mutant, tmp_path)
