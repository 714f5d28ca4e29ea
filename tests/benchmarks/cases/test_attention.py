from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks.cases.attention import attention_cases, case_id, mask_cases
from benchmarks.cases.cpu import (
    decode_cases,
    mask_price_cases,
    scaling_cases,
    sdpa_cases,
    short_cases,
)
from transformer_kernels.bench import Case


def cpu_cases() -> list[Case]:
    """Without those with options, which hold a large bias."""
    masked = mask_price_cases(torch.float32)
    return [*sdpa_cases(), *masked, *decode_cases(), *short_cases(), *scaling_cases()]


SUITES = {"attention": attention_cases(), "masks": mask_cases(), "cpu": cpu_cases()}


@pytest.mark.parametrize("case", [*mask_cases(), *mask_price_cases(torch.float32)], ids=case_id)
def test_every_query_sees_a_key(case: Case) -> None:
    """Naive attention gives NaN where one does not, and could not be compared."""
    if case.mask is not None:
        assert case.mask.materialize(1, 1, case.M, case.N).any(dim=-1).all()


def test_masks_spread_over_the_visible_share() -> None:
    shares = sorted(case.visible for case in mask_cases())
    assert shares[0] < 0.05
    assert shares[-1] == 1.0
    assert max(b - a for a, b in pairwise(shares)) <= 0.5


def test_priced_masks_show_what_their_names_say() -> None:
    shares = [case.visible for case in mask_price_cases(torch.float32)]
    assert shares == pytest.approx([1.0, 0.5, 0.125, 0.25, 0.5], abs=0.01)


@pytest.mark.parametrize("cases", SUITES.values(), ids=SUITES.keys())
def test_names_are_unique(cases: list[Case]) -> None:
    """So that recorded rows of one case do not replace another's."""
    names = [case_id(case) for case in cases]
    assert len(set(names)) == len(names)
