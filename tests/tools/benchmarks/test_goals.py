"""Goals: figures of recorded rows, the table of checks, and the goals of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.goals.check import MISSING, as_columns, as_markdown, check_goals, main
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
from transformer_kernels.bench import Case, Direction, Row, write_rows

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


def run_on(day: int, *rows: Row) -> list[Row]:
    return [replace(one, date=f"2026-02-0{day}T00:00:00Z") for one in rows]


def test_rows_of_different_runs_are_not_compared() -> None:
    alone = run_on(2, timed(8.0))
    assert OVER_SDPA.figures([*run_on(1, timed(4.0, variant="sdpa")), *alone]) == []
    (figure,) = OVER_SDPA.figures([*alone, *run_on(1, *pair(4.0))])
    assert figure.ratio == 4.0


def test_the_last_run_of_each_pair_counts() -> None:
    runs = [*run_on(3, *pair(3.0, N=1)), *run_on(1, *pair(2.0, N=1), *pair(5.0, N=2))]
    assert [figure.ratio for figure in OVER_SDPA.figures(runs)] == [3.0, 5.0]


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


TWO_OF_SDPA = {
    "cpu": [
        Goal(name="fast", over={"variant": "sdpa"}, under={"variant": "cpu"}, least=1.5),
        Goal(name="faster", over={"variant": "sdpa"}, under={"variant": "cpu"}, least=3.0),
        Goal(name="scales", over={"threads": 1}, under={"threads": 2}, least=1.8),
    ]
}


def twice_as_fast() -> list[Row]:
    """Rows of one call; SDPA takes twice as long as ours."""
    ours = replace(row(), suite="cpu", case="full", dtype="float32")
    return [ours, replace(ours, variant="sdpa", median_ms=2 * ours.median_ms)]


def test_a_goal_is_reached_missed_or_not_measured() -> None:
    checks = check_goals(twice_as_fast(), TWO_OF_SDPA)
    assert [(line.status, line.measured) for line in checks] == [
        ("pass", "2.00 of 1"),
        ("FALL SHORT", "2.00 of 1"),
        (MISSING, ""),
    ]
    assert checks[0].worst == "2.00 (float32, S = 4, D = 64, full, fwd: 4 ms / 2 ms)"


def test_rows_are_compared_with_the_goals_of_their_suite_only() -> None:
    suites = {"cpu": TWO_OF_SDPA["cpu"][:1], "gpu": TWO_OF_SDPA["cpu"][1:2]}
    others = {
        name: [replace(one, suite=name) for one in twice_as_fast()] for name in ("gpu", "attention")
    }
    found = check_goals([*twice_as_fast(), *others["gpu"], *others["attention"]], suites)
    assert [(line.goal, line.measured) for line in found] == [
        ("fast", "2.00 of 1"),
        ("faster", "2.00 of 1"),
    ]
    assert check_goals(others["attention"], TWO_OF_SDPA) == []


def test_the_goals_are_those_of_the_device() -> None:
    for device, goals in (("xeon-amx", GOALS), ("epyc-avx2", GOALS_WITHOUT_AMX)):
        checks = check_goals([replace(one, device=device) for one in twice_as_fast()])
        assert [line.goal for line in checks] == [goal.name for goal in goals]


def test_columns_are_aligned_and_markdown_is_a_table() -> None:
    title, *lines = as_columns(check_goals(twice_as_fast(), TWO_OF_SDPA))
    at = title.index("status")
    assert [line[at:].split("  ")[0] for line in lines] == ["pass", "FALL SHORT", MISSING]
    lines = as_markdown(check_goals(twice_as_fast(), TWO_OF_SDPA))
    assert {line.count("|") for line in lines} == {6}
    assert lines[2].startswith("| fast | >= 1.5 | 2.00 of 1 | pass | 2.00 (float32, S = 4, D = 64,")


def test_the_command_checks_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, sdpa = twice_as_fast()
    close = [ours, replace(sdpa, median_ms=1.2 * ours.median_ms)]
    earlier = [replace(one, date="2025-01-01T00:00:00Z") for one in twice_as_fast()]
    write_rows(tmp_path / "cpu.csv", [*earlier, *close])
    for options, cell in (([], "  FALL SHORT  "), (["--markdown"], "| FALL SHORT |")):
        monkeypatch.setattr(sys, "argv", ["check", str(tmp_path / "cpu.csv"), *options])
        main()
        text = capsys.readouterr().out
        assert text.startswith("xeon-amx, torch 2.13.0+cpu, commit abc1234, 2026-01-02\n")
        assert "float32, S = 4, D = 64, full, fwd: 2.4 ms / 2 ms" in text
        assert text.count(cell) == 1
        assert text.endswith(f"1 of {len(GOALS)} goals are reached.\n")
    write_rows(tmp_path / "masks.csv", [replace(one, suite="masks") for one in close])
    monkeypatch.setattr(sys, "argv", ["check", str(tmp_path / "masks.csv")])
    with pytest.raises(SystemExit):
        main()
    assert "has no rows of the suites cpu, models, gpu" in capsys.readouterr().err


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


def test_every_goal_finds_its_rows_in_the_suite() -> None:
    rows = list(whole_suite())
    limits, masks, options = [4] * 2, [6] * 4, [1] * 3
    others = limits + masks + options + [3] * 2 + [6] * 4 + [4] * 2
    for goals, sdpa in ((GOALS, [6, 6, 6, 6, 12] * 3), (GOALS_WITHOUT_AMX, [6, 6, 12] * 3)):
        assert [len(goal.figures(rows)) for goal in goals] == sdpa + others


def test_goals_of_models_find_every_call() -> None:
    rows = [
        one
        for call in calls()
        for direction in call.directions
        for one in rows_of(call.checked_case(), ("sdpa", "cpu"), direction)
    ]
    assert [len(goal.figures(rows)) for goal in MODEL_GOALS] == [len(MODELS)] * 4
