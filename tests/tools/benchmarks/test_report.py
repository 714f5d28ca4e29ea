"""The report of a device, and the figures in README.md and docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report.device import Entry, entries, report, write_report
from benchmarks.report.readme import (
    DETAILS,
    README,
    between_marks,
    details,
    figures,
    gains,
    models,
    write,
)
from benchmarks.runner.record import RECORDED
from tests.tools.bench.example import row
from transformer_kernels.bench import Row, read_rows, write_rows

TIMES = {"naive": 9.0, "sdpa": 3.0, "flash_attn": 2.5, "cpu": 2.0, "gemm": 1.5}


def rows(suite: str = "models", **times: float) -> list[Row]:
    """Rows of one call, with the times of `TIMES` or these."""
    made = replace(row(), suite=suite, case="Whisper", M=6, N=8, H_q=4, H_kv=2)
    return [
        replace(made, variant=variant, median_ms=ms) for variant, ms in {**TIMES, **times}.items()
    ]


def only(of_call: list[Row]) -> Entry:
    (entry,) = entries(of_call)
    return entry


def test_ours_is_compared_with_naive_the_fastest_peer_and_the_ceiling() -> None:
    assert only(rows()).cells == [
        "Whisper, float16, B 1, H 4/2, S 6 x 8, D 64", "forward",
        "2", "4.50", "1.25", "flash_attn", "75%", "3.0", "1e-07",
    ]  # fmt: skip


def test_disturbed_times_have_a_star() -> None:
    assert only([replace(one, slower=0.3) for one in rows()]).cells[2:4] == ["2*", "4.50"]


def test_our_fastest_variant_counts() -> None:
    entry = only([*rows(), replace(rows()[0], variant="triton", median_ms=1.0)])
    assert (entry.ours.variant, entry.cells[4], entry.is_loss) == ("triton", "2.50", False)


def test_each_peer_is_compared_in_its_last_run_with_ours() -> None:
    """The machine was half as fast on the second day. On the third, ours did not run."""
    second = {"cpu": 4.0, "sdpa": 7.0, "naive": 12.0}
    third = {"sdpa": 8.0}
    later = [
        replace(one, date=f"2026-02-0{day}T00:00:00Z", median_ms=times[one.variant])
        for day, times in ((2, second), (3, third))
        for one in rows()
        if one.variant in times
    ]
    entry = only([*later, *rows()])
    assert entry.cells[2:7] == ["4", "3.00", "1.25", "flash_attn", "75%"]
    entry = only([one for one in [*rows(), *later] if one.variant != "flash_attn"])
    assert entry.cells[2:7] == ["4", "3.00", "1.75", "torch SDPA", "75%"]


def test_what_was_not_measured_is_left_blank() -> None:
    alone = [one for one in rows() if one.variant == "cpu"]
    assert only([replace(alone[0], peak_mib=None)]).cells[3:8] == ["–"] * 5
    assert not only(alone).is_loss
    assert list(entries(one for one in rows() if one.variant != "cpu")) == []


def test_losses_come_first_and_the_worst_of_them_first(tmp_path: Path) -> None:
    write_rows(tmp_path / "models.csv", rows(sdpa=1.0))
    write_rows(
        tmp_path / "attention.csv",
        [
            *(replace(one, case="causal", mask="causal") for one in rows("attention", sdpa=0.5)),
            *(replace(one, case="full") for one in rows("attention")),
        ],
    )
    made = report(tmp_path)
    assert [entry.ours.case for entry in made.losses] == ["causal", "Whisper"]
    assert (len(made.losses), len(made.compared)) == (2, 3)
    assert [section.suite for section in made.sections] == ["models", "attention"]


def test_report_is_written_beside_the_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "attention.csv", rows("attention", sdpa=0.5))
    write_rows(tmp_path / "models.csv", [replace(one, dtype="float32") for one in rows()])
    markdown, html = write_report(tmp_path)
    assert (markdown.name, html.name) == ("report.md", "report.html")
    lines = markdown.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Benchmarks on xeon-amx"
    assert "1 of 2 calls that another implementation runs too." in lines
    assert lines.index("## Slower than a peer") < lines.index("## Goals")
    assert any(line.startswith("| float32, forward: SDPA / ours, worst | >= 1 |") for line in lines)
    table = next(number for number, line in enumerate(lines) if line.startswith("| call |"))
    assert lines[table + 2].count("|") == lines[table].count("|")
    text = html.read_text(encoding="utf-8")
    assert '<tr class="lost"><td>Whisper, float16' in text
    assert "<svg" in text
    assert "<h2>Suite models</h2>" in text


def test_a_folder_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no rows of the suites models, cpu"):
        write_report(tmp_path)


BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
MEASURED = "8.0 ms | 3.0 ms | 2.0 ms | 4.0x | 1.50x |"


def three_variants(N: int = 4, dtype: str = "float32") -> list[Row]:
    speeds = {"naive": 8.0, "sdpa": 3.0, "cpu": 2.0}
    return [
        replace(row(), variant=variant, median_ms=ms, direction=direction, N=N, dtype=dtype)
        for variant, ms in speeds.items()
        for direction in ("fwd", "fwd+bwd")
    ]


def test_gains_are_ratios_of_medians() -> None:
    line = details(three_variants()).splitlines()[-1]
    assert line.startswith(f"| 4 | forward + backward | {MEASURED}")


def test_the_last_run_with_all_three_counts() -> None:
    earlier, later = (
        [replace(one, date=date, median_ms=speed * one.median_ms) for one in three_variants()]
        for date, speed in (("2026-01-01T00:00:00Z", 9.0), ("2026-02-01T00:00:00Z", 5.0))
    )
    alone = [one for one in later if one.variant == "cpu"]
    line = details([*earlier, *three_variants(), *alone]).splitlines()[-1]
    assert line.startswith(f"| 4 | forward + backward | {MEASURED}")


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
    made = [replace(one, case="GPT-2", H_q=4, H_kv=2) for one in three_variants()]
    only_forward = [replace(one, dtype="bfloat16") for one in made if one.direction == "fwd"]
    later = [replace(one, case="GPT of four heads, two texts") for one in only_forward]
    assert models([*made, *only_forward, *later]).splitlines()[4:] == [
        "| GPT of four heads, two texts | (1, 4/2, 4, 4, 64) | bfloat16 | 2 | 4.00 | 1.50 | – |",
        "| GPT-2 | (1, 4/2, 4, 4, 64) | float32 | 2 / 2 | 4.00 / 4.00 | 1.50 / 1.50 | – / – |",
        "| GPT-2 | (1, 4/2, 4, 4, 64) | bfloat16 | 2 | 4.00 | 1.50 | – |",
    ]


def test_the_pages_show_recorded_rows() -> None:
    """Run `python -m benchmarks.report.readme <device>` after recording."""
    devices = [path.parent.name for path in RECORDED.glob("*/attention.csv")]
    pages = ((README, "gains", [gains()]), (DETAILS, "figures", list(map(figures, devices))))
    for page, name, texts in pages:
        assert between_marks(page.read_text(encoding="utf-8"), name)[1] in texts


def test_the_table_of_models_shows_recorded_rows() -> None:
    """Run `python -m benchmarks.report.readme <device> --models <device>` after recording."""
    _, between, _ = between_marks(DETAILS.read_text(encoding="utf-8"), "models")
    assert between in [models(read_rows(path)) for path in RECORDED.glob("*/models.csv")]
