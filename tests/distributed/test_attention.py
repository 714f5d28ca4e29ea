"""Attention over a divided sequence: the table of cases, against the undivided call."""

from __future__ import annotations

import pytest

from tests.support.processes import assert_runs

CHECK = "tests.distributed.divided:check_cases"


@pytest.mark.quick
def test_a_sample_of_all_checks() -> None:
    """Documents, the switch and errors included."""
    assert_runs(2, "tests.distributed.sample:check_sample")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "layout", "heads", "first", "step"),
    [
        (3, "zigzag", 1, 0, 1),
        (4, "zigzag", 2, 0, 1),
        (2, "zigzag", 1, 0, 3),
        (2, "contiguous", 1, 1, 3),
        (2, "contiguous", 2, 0, 2),
        (2, "zigzag", 2, 1, 4),
        (4, "contiguous", 1, 2, 4),
    ],
)
def test_cases_equal_the_undivided_call(
    count: int, layout: str, heads: int, first: int, step: int
) -> None:
    assert_runs(count, CHECK, layout, heads, "float64", "auto", first, step)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "first"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_other_dtypes_keep_the_tolerance(dtype: str, first: int) -> None:
    assert_runs(2, CHECK, "zigzag", 1, dtype, "auto", first, 3)


@pytest.mark.exhaustive
def test_the_reference_equals_the_undivided_call() -> None:
    assert_runs(2, CHECK, "zigzag", 1, "float64", "reference", 1, 3)
