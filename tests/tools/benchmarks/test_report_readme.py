from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report.readme import (
    DETAILS,
    between_marks,
    details,
    figures,
    models,
    summary,
    write,
)
from benchmarks.runner.record import RECORDED
from tests.tools.bench.example import row
from transformer_kernels.bench import Row, read_rows

BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
MEASURED = "8.0 ms | 3.0 ms | 2.0 ms | 4.0x | 1.50x |"


def rows(N: int = 4, dtype: str = "float32") -> list[Row]:
    speeds = {"naive": 8.0, "sdpa": 3.0, "cpu": 2.0}
    return [
        replace(row(), variant=variant, median_ms=ms, direction=direction, N=N, dtype=dtype)
        for variant, ms in speeds.items()
        for direction in ("fwd", "fwd+bwd")
    ]


def test_gains_are_ratios_of_medians() -> None:
    line = details(rows()).splitlines()[-1]
    assert line.startswith(f"| 4 | forward + backward | {MEASURED}")


def test_the_last_run_with_all_three_counts() -> None:
    earlier, later = (
        [replace(one, date=date, median_ms=speed * one.median_ms) for one in rows()]
        for date, speed in (("2026-01-01T00:00:00Z", 9.0), ("2026-02-01T00:00:00Z", 5.0))
    )
    alone = [one for one in later if one.variant == "cpu"]
    line = details([*earlier, *rows(), *alone]).splitlines()[-1]
    assert line.startswith(f"| 4 | forward + backward | {MEASURED}")


def test_the_summary_has_the_longest_sequence_of_each_dtype() -> None:
    text = summary([[*rows(), *rows(8)], [*rows(8, "bfloat16")]])
    assert ", 8, " in text.splitlines()[0]
    assert [line.split(" | ")[0] for line in text.splitlines()[4:]] == [
        *("| float32",) * 2,
        *("| bfloat16",) * 2,
    ]
    assert f"| bfloat16 | forward | {MEASURED}" in text


def test_text_outside_the_marks_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n", encoding="utf-8")
    write(page, "figures", "new\n")
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}new\n{END}after\n"


@pytest.mark.parametrize("text", ["", BEGIN, BEGIN + BEGIN + END])
def test_a_missing_or_doubled_mark_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must have one line '<!-- figures"):
        between_marks(text, "figures")


def test_models_have_a_line_for_each_call_and_dtype() -> None:
    made = [replace(one, case="GPT-2", H_q=4, H_kv=2) for one in rows()]
    only_forward = [replace(one, dtype="bfloat16") for one in made if one.direction == "fwd"]
    later = [replace(one, case="GPT of four heads, two texts") for one in only_forward]
    assert models([*made, *only_forward, *later]).splitlines()[4:] == [
        "| GPT of four heads, two texts | (1, 4/2, 4, 4, 64) | bfloat16 | 2 | 4.00 | 1.50 | – |",
        "| GPT-2 | (1, 4/2, 4, 4, 64) | float32 | 2 / 2 | 4.00 / 4.00 | 1.50 / 1.50 | – / – |",
        "| GPT-2 | (1, 4/2, 4, 4, 64) | bfloat16 | 2 | 4.00 | 1.50 | – |",
    ]


def test_the_pages_show_recorded_rows() -> None:
    """Run `python -m benchmarks.report.readme <device>` after recording."""
    texts = [figures(path.parent.name) for path in RECORDED.glob("*/attention.csv")]
    for page in texts[0]:
        _, between, _ = between_marks(page.read_text(encoding="utf-8"), "figures")
        assert between in [of_device[page] for of_device in texts]


def test_the_table_of_models_shows_recorded_rows() -> None:
    """Run `python -m benchmarks.report.readme <device> --models <device>` after recording."""
    _, between, _ = between_marks(DETAILS.read_text(encoding="utf-8"), "models")
    assert between in [models(read_rows(path)) for path in RECORDED.glob("*/models.csv")]
