from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks.cases.attention import attention_cases, case_id, mask_cases
from benchmarks.cases.cpu import (
    decode_cases,
    mask_cost_cases,
    scaling_cases,
    sdpa_cases,
    short_cases,
)
from tests.support.tiers import each
from transformer_kernels.bench import Case


def cpu_cases() -> list[Case]:
    """Cases of the suite `cpu`, except those with options, which hold a large bias."""
    masked = mask_cost_cases(torch.float32)
    return [*sdpa_cases(), *masked, *decode_cases(), *short_cases(), *scaling_cases()]


SUITES = {"attention": attention_cases(), "masks": mask_cases(), "cpu": cpu_cases()}


@each("case", [*mask_cases(), *mask_cost_cases(torch.float32)], ids=case_id)
def test_every_query_sees_a_key(case: Case) -> None:
    """Otherwise naive attention gives NaN, which cannot be compared."""
    if case.mask is not None:
        assert case.mask.materialize(1, 1, case.M, case.N).any(dim=-1).all()


def test_masks_cover_the_range_of_visible_fractions() -> None:
    fractions = sorted(case.visible for case in mask_cases())
    assert fractions[0] < 0.05
    assert fractions[-1] == 1.0
    assert max(b - a for a, b in pairwise(fractions)) <= 0.5


def test_visible_fractions_match_the_names_of_the_masks() -> None:
    fractions = [case.visible for case in mask_cost_cases(torch.float32)]
    assert fractions == pytest.approx([1.0, 0.5, 0.125, 0.25, 0.5], abs=0.01)


@pytest.mark.parametrize("cases", SUITES.values(), ids=SUITES.keys())
def test_names_are_unique(cases: list[Case]) -> None:
    """Otherwise recorded rows of one case would replace those of another."""
    names = [case_id(case) for case in cases]
    assert len(set(names)) == len(names)
