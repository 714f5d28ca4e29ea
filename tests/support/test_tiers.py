"""The sample of `make test` covers every option, size, backend and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.cases import CASES, Case
from tests.support.decode_cases import DECODE_CASES
from tests.support.mask_makers import both, causal, padding
from tests.support.tiers import features, in_turns, sample, sampled
from tests.support.varlen_cases import VARLEN_CASES

WAYS = (("cpu", "float32"), ("cpu", "float16"), ("cuda", "float32"), ("cuda", "float16"))


def in_sample(parameters: Sequence[ParameterSet]) -> list[tuple[Any, ...]]:
    return [tuple(one.values) for one in parameters if not one.marks]


def test_features_are_sizes_options_and_kinds_of_masks() -> None:
    plain, other = Case(name="plain"), Case(name="other", M=7, mask=both(causal, padding))
    assert features(plain) == frozenset()
    sizes, kinds = {("M", "7")}, {("window", "top_left", None, False), "KeyRange"}
    assert features(other) == sizes | {frozenset(kinds)}


@pytest.mark.parametrize("cases", [CASES, VARLEN_CASES, DECODE_CASES], ids=lambda x: x[0].name)
def test_every_backend_has_every_feature_and_every_dtype(cases: Sequence[Any]) -> None:
    everything = frozenset[Any]().union(*map(features, cases))
    chosen = in_sample(sampled(cases, WAYS))
    for backend in ("cpu", "cuda"):
        own = [(case, dtype) for case, name, dtype in chosen if name == backend]
        assert frozenset[Any]().union(*(features(case) for case, _ in own)) == everything
        assert {dtype for _, dtype in own} == {"float32", "float16"}
        assert len({case.name for case, _ in own}) == len(own) < len(cases)


def test_every_chosen_case_adds_a_feature() -> None:
    seen: frozenset[Any] = frozenset()
    for case in sample(CASES):
        assert features(case) - seen
        seen |= features(case)


def test_all_cases_are_in_the_exhaustive_tier() -> None:
    parameters = sampled(CASES, WAYS)
    assert len(parameters) == len(CASES) * len(WAYS)
    assert len({one.id for one in parameters}) == len(parameters)


def test_items_in_turns_run_once_each_in_the_sample() -> None:
    ways = (("cpu",), ("cuda",))
    assert in_sample(in_turns("abc", ways)) == [("a", "cpu"), ("b", "cuda"), ("c", "cpu")]
    assert len(in_turns("abc", ways)) == 6
