from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.suites import attention_cases, case_id, mask_cases
from transformer_kernels.bench import Case


@pytest.mark.parametrize("case", mask_cases(), ids=case_id)
def test_every_query_sees_a_key(case: Case) -> None:
    """Naive attention gives NaN where one does not, and could not be compared."""
    if case.mask is not None:
        assert case.mask.materialize(1, 1, case.M, case.N).any(dim=-1).all()


def test_masks_spread_over_the_visible_share() -> None:
    shares = sorted(case.visible for case in mask_cases())
    assert shares[0] < 0.05
    assert shares[-1] == 1.0
    assert max(b - a for a, b in pairwise(shares)) <= 0.5


@pytest.mark.parametrize("cases", [attention_cases(), mask_cases()], ids=["attention", "masks"])
def test_names_are_unique(cases: list[Case]) -> None:
    names = [case_id(case) for case in cases]
    assert len(set(names)) == len(names)
