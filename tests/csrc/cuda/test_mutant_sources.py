"""Every mutant applies to the current sources. Running the mutants takes minutes."""

from __future__ import annotations

from tests.csrc.cuda import test_hopper_mutants, test_linear_mutants, test_mutants
from tests.csrc.cuda.mutants import ROOT, Mutant, mutated
from tests.support.tiers import each

MUTANTS = (*test_mutants.MUTANTS, *test_hopper_mutants.MUTANTS, *test_linear_mutants.MUTANTS)


@each("mutant", MUTANTS, ids=str)
def test_mutant_changes_one_place(mutant: Mutant) -> None:
    assert mutated(mutant) != (ROOT / "csrc/cuda" / mutant.source).read_text()
