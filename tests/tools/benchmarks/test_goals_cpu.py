from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.goals.cpu import GOALS, GOALS_WITHOUT_AMX, MODEL_GOALS
from benchmarks.goals.goal import Goal
from benchmarks.runner.caches import cache_attends
from benchmarks.runner.without_amx import SUFFIX
from benchmarks.suites.attention import DTYPES
from benchmarks.suites.cpu import (
    decode_cases,
    mask_cases,
    option_cases,
    scaling_cases,
    sdpa_cases,
    short_cases,
)
from benchmarks.suites.models import MODELS, calls
from tests.tools.bench.example import row
from transformer_kernels.bench import Case, Direction, Row


def rows_of(
    case: Case, variants: tuple[str, ...], direction: Direction, threads: int = 2
) -> list[Row]:
    made = replace(row(case=case), suite="cpu", direction=direction, threads=threads)
    return [replace(made, variant=variant) for variant in variants]


def whole_suite() -> Iterator[Row]:
    """Rows as the suite `cpu` records them; cases with a large bias in one dtype only."""
    both: tuple[Direction, ...] = ("fwd", "fwd+bwd")
    for direction in both:
        for case in sdpa_cases():
            for name in (case.name, case.name + SUFFIX):
                yield from rows_of(replace(case, name=name), ("naive", "sdpa", "cpu"), direction)
            yield from rows_of(case, ("gemm",), direction)
        for dtype in DTYPES:
            for case in mask_cases(dtype):
                yield from rows_of(case, ("cpu",), direction)
        for case in short_cases():
            yield from rows_of(case, ("naive", "sdpa", "cpu"), direction)
        for case in scaling_cases():
            for threads in (1, 2):
                yield from rows_of(case, ("cpu",), direction, threads)
    for case in option_cases(torch.bfloat16):
        yield from rows_of(case, ("cpu",), "fwd+bwd")
    for case in decode_cases():
        yield from rows_of(case, ("sdpa", "cpu", "sum"), "fwd")
        small = torch.zeros(case.B, 1, case.N, 1)
        for name in cache_attends(small, small, "cpu"):
            yield from rows_of(replace(case, name=name), ("cpu",), "fwd")


@pytest.mark.parametrize(
    ("goals", "against_sdpa"),
    [(GOALS, [6, 6, 6, 6, 12] * 3), (GOALS_WITHOUT_AMX, [6, 6, 12] * 3)],
)
def test_every_goal_finds_its_rows_in_the_suite(
    goals: tuple[Goal, ...], against_sdpa: list[int]
) -> None:
    rows = list(whole_suite())
    found = [len(goal.figures(rows)) for goal in goals]
    limits, masks, options = [4] * 2, [6] * 4, [1] * 3
    assert found == against_sdpa + limits + masks + options + [3] * 2 + [6] * 4 + [4] * 2


def test_goals_of_models_find_every_call() -> None:
    rows = [
        one
        for call in calls()
        for direction in call.directions
        for one in rows_of(call.checked_case(), ("sdpa", "cpu"), direction)
    ]
    assert [len(goal.figures(rows)) for goal in MODEL_GOALS] == [len(MODELS)] * 4
