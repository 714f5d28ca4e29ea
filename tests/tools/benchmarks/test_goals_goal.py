from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.goals.goal import Goal
from tests.tools.bench.example import row
from transformer_kernels.bench import Row

OVER_SDPA = Goal(name="", over={"variant": "sdpa"}, under={"variant": "cpu"}, least=2.0)
COST = Goal(name="", over={"case": "masked"}, under={"case": "none"}, most=1.5)


def timed(ms: float, **columns: object) -> Row:
    return replace(row(), median_ms=ms, **columns)  # type: ignore[arg-type]


def pair(ms: float, **columns: object) -> list[Row]:
    """Rows of SDPA, with this time, and of ours, with 1 ms."""
    return [timed(ms, variant="sdpa", **columns), timed(1.0, **columns)]


def test_only_matching_rows_are_compared_and_the_worst_comes_first() -> None:
    rows = [*pair(4.0, N=1), *pair(3.0, N=2), timed(9.0, variant="sdpa", N=3), timed(9.0, N=4)]
    figures = OVER_SDPA.figures(rows)
    assert [figure.ratio for figure in figures] == [3.0, 4.0]
    assert "S = 2" in str(figures[0])
    assert "3 ms / 1 ms" in str(figures[0])


def run(day: int, *rows: Row) -> list[Row]:
    return [replace(one, date=f"2026-02-0{day}T00:00:00Z") for one in rows]


def test_rows_of_different_runs_are_not_compared() -> None:
    alone = run(2, timed(8.0))
    assert OVER_SDPA.figures([*run(1, timed(4.0, variant="sdpa")), *alone]) == []
    (figure,) = OVER_SDPA.figures([*alone, *run(1, *pair(4.0))])
    assert figure.ratio == 4.0


def test_the_last_run_of_each_pair_counts() -> None:
    runs = [*run(3, *pair(3.0, N=1)), *run(1, *pair(2.0, N=1), *pair(5.0, N=2))]
    assert [figure.ratio for figure in OVER_SDPA.figures(runs)] == [3.0, 5.0]


def test_the_last_speed_counts() -> None:
    goal = Goal(name="", over={"variant": "cpu"}, under=None, least=700)
    rows = [*run(2, timed(1.0, tflops=720.0)), *run(1, timed(1.0, tflops=690.0))]
    assert [figure.ratio for figure in goal.figures(rows)] == [720.0]


def test_the_worst_ratio_or_the_geometric_mean_is_compared() -> None:
    figures = OVER_SDPA.figures([*pair(1.0, N=1), *pair(4.0, N=2)])
    assert OVER_SDPA.measured(figures) == 1.0
    assert replace(OVER_SDPA, by="mean").measured(figures) == pytest.approx(2.0)


def test_where_selects_by_one_value_or_several() -> None:
    rows = [*pair(2.0, N=1), *pair(3.0, N=2), *pair(4.0, N=3)]
    for where, ratios in (({"N": 2}, [3.0]), ({"N": (1, 3)}, [2.0, 4.0])):
        goal = replace(OVER_SDPA, where=where)
        assert [figure.ratio for figure in goal.figures(rows)] == ratios


def test_the_cost_of_a_mask_is_relative_to_the_visible_fraction_and_the_highest_is_worst() -> None:
    none = [timed(8.0, case="none", N=n, visible=1.0) for n in (1, 2)]
    masked = [timed(ms, case="masked", N=n, visible=0.25) for n, ms in ((1, 2.0), (2, 3.0))]
    figures = COST.figures([*none, *masked])
    assert [figure.ratio for figure in figures] == [1.5, 1.0]


@pytest.mark.parametrize(
    ("goal", "measured", "reached"),
    [(OVER_SDPA, 1.99, False), (OVER_SDPA, 2.0, True), (COST, 1.5, True), (COST, 1.51, False)],
)
def test_bounds_are_inclusive(goal: Goal, measured: float, reached: bool) -> None:
    assert goal.reached(measured) == reached
    assert goal.bound == (">= 2" if goal is OVER_SDPA else "<= 1.5")


def test_a_speed_goal_needs_no_partner_rows_and_the_slowest_is_worst() -> None:
    goal = Goal(name="", over={"variant": "cpu"}, under=None, where={"N": (1, 2)}, least=700)
    rows = [timed(1.0, N=n, tflops=speed) for n, speed in ((1, 690.0), (2, 720.0), (3, 1.0))]
    figures = goal.figures([*rows, timed(1.0, N=1, variant="sdpa", tflops=2.0)])
    assert [figure.ratio for figure in figures] == [690.0, 720.0]
    assert str(figures[0]) == "float16, S = 1, D = 64, causal, fwd: 1 ms"
    assert not goal.reached(goal.measured(figures))
    assert goal.bound == ">= 700"
