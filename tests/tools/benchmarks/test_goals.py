from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.goals import cpu
from benchmarks.goals.check import MISSING, as_columns, as_markdown, check_goals, main
from benchmarks.goals.goal import Goal
from tests.tools.bench.example import row
from transformer_kernels.bench import Row, write_rows

GOALS = {
    "cpu": [
        Goal(name="fast", over={"variant": "sdpa"}, under={"variant": "cpu"}, least=1.5),
        Goal(name="faster", over={"variant": "sdpa"}, under={"variant": "cpu"}, least=3.0),
        Goal(name="scales", over={"threads": 1}, under={"threads": 2}, least=1.8),
    ]
}


def rows() -> list[Row]:
    """SDPA takes twice as long as ours."""
    ours = replace(row(), suite="cpu", case="full", dtype="float32")
    return [ours, replace(ours, variant="sdpa", median_ms=2 * ours.median_ms)]


def test_a_goal_is_reached_missed_or_not_measured() -> None:
    checks = check_goals(rows(), GOALS)
    assert [(line.status, line.measured) for line in checks] == [
        ("pass", "2.00 of 1"),
        ("FALL SHORT", "2.00 of 1"),
        (MISSING, ""),
    ]
    assert checks[0].worst == "2.00 (float32, S = 4, D = 64, full, fwd: 4 ms / 2 ms)"


def test_rows_are_compared_with_the_goals_of_their_suite_only() -> None:
    suites = {"cpu": GOALS["cpu"][:1], "gpu": GOALS["cpu"][1:2]}
    rows_of = {name: [replace(one, suite=name) for one in rows()] for name in ("gpu", "attention")}
    found = check_goals([*rows(), *rows_of["gpu"], *rows_of["attention"]], suites)
    assert [(line.goal, line.measured) for line in found] == [
        ("fast", "2.00 of 1"),
        ("faster", "2.00 of 1"),
    ]
    assert check_goals(rows_of["attention"], GOALS) == []


@pytest.mark.parametrize(
    ("device", "goals"), [("xeon-amx", cpu.GOALS), ("epyc-avx2", cpu.GOALS_WITHOUT_AMX)]
)
def test_the_goals_are_those_of_the_device(device: str, goals: tuple[Goal, ...]) -> None:
    checks = check_goals([replace(one, device=device) for one in rows()])
    assert [line.goal for line in checks] == [goal.name for goal in goals]


def test_columns_are_aligned_and_markdown_is_a_table() -> None:
    title, *lines = as_columns(check_goals(rows(), GOALS))
    at = title.index("status")
    assert [line[at:].split("  ")[0] for line in lines] == ["pass", "FALL SHORT", MISSING]
    lines = as_markdown(check_goals(rows(), GOALS))
    assert {line.count("|") for line in lines} == {6}
    assert lines[2].startswith("| fast | >= 1.5 | 2.00 of 1 | pass | 2.00 (float32, S = 4, D = 64,")


@pytest.mark.parametrize(
    ("options", "cell"), [([], "  FALL SHORT  "), (["--markdown"], "| FALL SHORT |")]
)
def test_the_command_checks_the_last_run(
    options: list[str],
    cell: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, sdpa = rows()
    close = [ours, replace(sdpa, median_ms=1.2 * ours.median_ms)]
    earlier = [replace(one, date="2025-01-01T00:00:00Z") for one in rows()]
    write_rows(tmp_path / "cpu.csv", [*earlier, *close])
    monkeypatch.setattr(sys, "argv", ["check", str(tmp_path / "cpu.csv"), *options])
    main()
    text = capsys.readouterr().out
    assert text.startswith("xeon-amx, torch 2.13.0+cpu, commit abc1234, 2026-01-02\n")
    assert "float32, S = 4, D = 64, full, fwd: 2.4 ms / 2 ms" in text
    assert text.count(cell) == 1
    assert text.endswith(f"1 of {len(cpu.GOALS)} goals are reached.\n")


def test_rows_of_suites_without_goals_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "masks.csv", [replace(one, suite="masks") for one in rows()])
    monkeypatch.setattr(sys, "argv", ["check", str(tmp_path / "masks.csv")])
    with pytest.raises(SystemExit):
        main()
    assert "has no rows of the suites cpu, models, gpu" in capsys.readouterr().err
