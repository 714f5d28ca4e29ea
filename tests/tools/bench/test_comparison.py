"""The tables and the page of a comparison."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from tests.tools.bench.comparison_example import CALL, comparison
from transformer_kernels.bench.comparison.report import (
    blocks,
    charts,
    factor,
    notes,
    print_results,
    write_page,
)
from transformer_kernels.bench.tables import milliseconds

TIMES = {"naive": 8.0, "sdpa": 2.0, "cpu": 1.0}
LOST = {"naive": 8.0, "sdpa": 1.0, "cpu": 1.25}


def test_lines_have_speed_ups_and_shares() -> None:
    forward, both = blocks(comparison(TIMES))
    assert [line.over_naive for line in forward.lines] == [1.0, 4.0, 8.0]
    assert [line.over_sdpa for line in both.lines] == [0.25, 1.0, 2.0]
    assert [line.share for line in forward.lines] == pytest.approx([1 / 16, 1 / 4, 1 / 2])
    assert forward.lines[0].spread == pytest.approx(0.15)
    assert forward.title == f"llama, prefill: {CALL}, forward"


def test_speed_up_over_what_was_not_measured_is_unknown() -> None:
    block, _ = blocks(comparison({"cpu": 1.0}))
    assert (block.lines[0].over_naive, block.lines[0].over_sdpa) == (None, None)
    assert block.loss is None
    assert [title for title, _ in charts(block)] == [
        "time, ms", "memory, MiB", "share of the machine's limit", "error, logarithmic",
    ]  # fmt: skip


def test_losses_are_named() -> None:
    assert "Slower than a peer" not in notes(comparison(TIMES))
    forward, both = notes(comparison(LOST))["Slower than a peer"]
    assert forward == f"llama, prefill: {CALL}, forward: torch SDPA is 1.25 times as fast"
    assert both.endswith("forward + backward: torch SDPA is 1.25 times as fast")


def test_omissions_are_named() -> None:
    assert notes(comparison(TIMES, skipped={"flex": "no kernel"})) == {
        "Not measured": [
            f"{CALL}: FlexAttention is not measured: no kernel",
            f"{CALL}: errors are those with 2 keys",
        ],
        "Disturbed": [
            "B 1, H 8, S 4, D 64, window:2, float16: the machine was up to 12% slower than usual"
        ],
    }


def test_table_fits_a_terminal_and_has_every_figure() -> None:
    console = Console(width=80, record=True, highlight=False)
    print_results(comparison(LOST), console)
    text = console.export_text()
    assert max(map(len, text.splitlines()[:12])) <= 80
    (fused,) = [line for line in text.splitlines() if line.strip().startswith("fused (cpu)  1.25")]
    assert fused.split()[2:] == ["1.25", "±15%", "6.40", "0.80", "3", "40%", "P", "1e-07"]
    assert "Slower than a peer:" in text
    assert "Not measured:" in text
    assert "Disturbed:" in text


def test_brackets_in_names_of_files_are_no_markup() -> None:
    found = comparison(TIMES)
    ((call, result),) = found.calls.results
    named = replace(call, mask="padding:[red]lengths.txt")
    calls = replace(found.calls, results=[(named, result)])
    console = Console(width=200, record=True, highlight=False)
    print_results(replace(found, calls=calls), console)
    assert "padding:[red]lengths.txt, float16, forward" in console.export_text()


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (12.34, "12.3"), (123.4, "123"), (1234.5, "1234")]
)
def test_three_digits(value: float, text: str) -> None:
    assert milliseconds(value) == text


def test_factors() -> None:
    assert [factor(x) for x in (None, 0.123, 9.876, 23.45, 123.4)] == [
        "–", "0.12", "9.88", "23.4", "123",
    ]  # fmt: skip


def test_bars_are_proportional() -> None:
    block, _ = blocks(comparison(TIMES))
    found = {title: [bar.length for bar in bars] for title, bars in charts(block)}
    assert found["time, ms"] == [1.0, 0.25, 0.125]
    assert found["times as fast as torch's SDPA"] == [0.125, 0.5, 1.0]
    assert found["share of the machine's limit"] == pytest.approx([1 / 16, 1 / 4, 1 / 2])
    # The example's error is 1.25e-7, on a scale that ends at 1e-17.
    assert found["error, logarithmic"] == pytest.approx([0.5939] * 3, abs=1e-4)


class Page(HTMLParser):
    """Tags, texts and references of a page."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.references: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_page_is_one_file_with_losses_first(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(comparison(LOST, skipped={"flex": "<b>no kernel</b>"}), path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.references == []
    assert "url(" not in text
    titles = [one for one in page.texts if one in ("Slower than a peer", "Not measured")]
    assert titles == ["Slower than a peer", "Not measured"]
    assert any("<b>no kernel</b>" in one for one in page.texts), "escaped"
    for expected in ("fused (cpu)", "40%", "1.12 to 1.5"):
        assert any(expected in one for one in page.texts), expected
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_page_without_losses_has_no_such_section(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(comparison(TIMES), path)
    assert "Slower than a peer" not in path.read_text(encoding="utf-8")
