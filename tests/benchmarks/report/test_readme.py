from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.report.readme import BEGIN, END, all_figures, figures, put_between_marks
from benchmarks.runner.record import RECORDED, ROOT
from tests.bench.example import row
from transformer_kernels.bench import Row


def rows() -> list[Row]:
    speeds = {"naive": 8.0, "sdpa": 3.0, "cpu": 2.0}
    return [
        replace(row(), variant=variant, median_ms=ms, direction=direction)
        for variant, ms in speeds.items()
        for direction in ("fwd", "fwd+bwd")
    ]


def test_gains_are_ratios_of_medians() -> None:
    line = figures(rows()).splitlines()[-1]
    assert line.startswith("| 4 | forward + backward | 8.0 ms | 3.0 ms | 2.0 ms | 4.0x | 1.50x |")


def test_text_outside_the_marks_stays() -> None:
    text = f"before\n{BEGIN}old\n{END}after\n"
    assert put_between_marks(text, "new\n") == f"before\n{BEGIN}new\n{END}after\n"


@pytest.mark.parametrize("text", ["", BEGIN, BEGIN + BEGIN + END])
def test_a_missing_or_doubled_mark_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must have one line '<!-- figures"):
        put_between_marks(text, "new\n")


def test_the_readme_shows_what_was_recorded() -> None:
    """Run `python -m benchmarks.report.readme <device>` after recording."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.split(BEGIN)[1].split(END)[0]
    devices = [path.parent.name for path in RECORDED.glob("*/attention.csv")]
    assert shown in [all_figures(device) for device in devices]
