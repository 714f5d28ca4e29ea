"""The command `bench`: measured calls, tables, the page, and saved runs."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.tools.bench.example import CALL, PROVENANCE, comparison, measured
from transformer_kernels.bench import Attend, Budget, Case, Variant, usable_variants
from transformer_kernels.bench.comparison import calls
from transformer_kernels.bench.comparison import run as comparing
from transformer_kernels.bench.comparison.calls import Call, Shape
from transformer_kernels.bench.comparison.report import (
    blocks,
    charts,
    factor,
    notes,
    print_results,
    write_page,
)
from transformer_kernels.bench.comparison.run import compare, measure_call
from transformer_kernels.bench.comparison.saved import changes, load, save
from transformer_kernels.bench.contenders import Measured
from transformer_kernels.bench.limits import Limits
from transformer_kernels.bench.rows import row_values
from transformer_kernels.bench.steadiness import Speed
from transformer_kernels.bench.tables import milliseconds

SHORT = Budget(0.0, fewest=2)
CALM = Speed(1.0, 1.0)
SMALL = replace(CALL, name="small", shape=Shape.parse("2,4,2,6,9,8"), dtype=torch.float32)


def test_every_variant_has_a_row_for_each_direction() -> None:
    result = measure_call(SMALL, usable_variants(["naive", "sdpa", "cpu"]), SHORT, PROVENANCE)
    assert [(one.row.direction, one.row.variant) for one in result.measured] == [
        (direction, variant)
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    ]
    for one in result.measured:
        assert (one.row.case, one.row.suite, one.row.mask) == ("small", "bench", "causal")
        assert (one.row.B, one.row.H_q, one.row.H_kv, one.row.M, one.row.N) == (2, 4, 2, 6, 9)
        assert one.row.visible == (4 + 5 + 6 + 7 + 8 + 9) / 54
        assert 0.0 < one.row.error < 1e-5
        assert len(one.laps) == 2
    assert (result.skipped, result.broken, result.checked_tokens) == ({}, {}, 9)


def test_long_sequences_are_checked_at_a_shorter_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of the whole call."""
    monkeypatch.setattr(calls, "CHECKED_PAIRS", 10)
    call = replace(SMALL, shape=Shape.parse("2,4,2,16,16,8"), mask="document:5,11")
    assert call.checked_case().M == call.checked_case().N == 2
    lengths = []

    def spy(case: Case) -> Attend:
        (sdpa,) = usable_variants(["sdpa"])
        attend = sdpa.attend_for(case)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            lengths.append(q.shape[2])
            return attend(q, k, v)

        return call

    variant = replace(usable_variants(["sdpa"])[0], attend_for=spy)
    result = measure_call(call, [variant], SHORT, PROVENANCE)
    assert lengths[:2] == [2, 16]
    assert {*lengths[2:]} == {16}
    assert result.checked_tokens == 2
    assert {one.row.N for one in result.measured} == {16}


def failing_at(length: int, *, is_peer: bool) -> Variant:
    def attend_for(case: Case) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.shape[2] == length:
                raise RuntimeError("out of memory")
            return right(q, k, v)

        (sdpa,) = usable_variants(["sdpa"])
        right = sdpa.attend_for(case)
        return attend

    return replace(usable_variants(["cpu"])[0], attend_for=attend_for, is_peer=is_peer)


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("length", [4, 16])
@pytest.mark.parametrize("is_peer", [True, False])
def test_variant_that_fails_is_named(
    length: int, is_peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the check, or at the call's own length."""
    monkeypatch.setattr(calls, "CHECKED_PAIRS", 16)
    call = replace(SMALL, shape=Shape.parse("1,2,2,16,16,8"))
    variants = [failing_at(length, is_peer=is_peer), *usable_variants(["sdpa"])]
    result = measure_call(call, variants, SHORT, PROVENANCE)
    assert {one.row.variant for one in result.measured} == {"sdpa"}
    named = {"cpu": "out of memory"}
    assert (result.skipped, result.broken) == ((named, {}) if is_peer else ({}, named))


@pytest.mark.usefixtures("without_memory")
def test_naive_attention_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "too_large_reason", lambda _case: "too large")
    result = measure_call(SMALL, usable_variants(["naive", "sdpa"]), SHORT, PROVENANCE)
    assert {one.row.variant for one in result.measured} == {"sdpa"}
    assert result.skipped == {"naive": "too large"}


@pytest.mark.usefixtures("without_memory")
def test_naive_attention_runs_in_few_rounds_where_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variants = usable_variants(["naive", "sdpa"])
    for slow, rounds in ((2 * 4 * 6 * 9, 3), (2 * 4 * 6 * 9 + 1, 7)):
        monkeypatch.setattr(comparing, "SLOW_SCORES", slow)
        monkeypatch.setattr(comparing, "NAIVE_ROUNDS", 3)
        result = measure_call(SMALL, variants, Budget(0.0, fewest=7), PROVENANCE)
        assert [len(one.laps) for one in result.measured] == [rounds, 7, rounds, 7]


@pytest.mark.usefixtures("without_memory")
def test_naive_attention_is_left_out_from_a_number_of_scores_on() -> None:
    """SMALL has 2 x 4 x 6 x 9 scores."""
    variants = usable_variants(["naive", "sdpa"])
    for most, names in ((433, {"naive", "sdpa"}), (432, {"sdpa"})):
        result = measure_call(SMALL, variants, SHORT, PROVENANCE, naive_scores=most)
        assert {one.row.variant for one in result.measured} == names
        assert ("fewer than 432 scores" in result.skipped.get("naive", "")) == (most == 432)


@pytest.mark.usefixtures("without_memory")
def test_naive_attention_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything else failed, however slow it is; and nothing at all is no error."""
    monkeypatch.setattr(comparing, "SLOW_SCORES", 1)
    variants = [failing_at(6, is_peer=True), *usable_variants(["naive"])]
    result = measure_call(SMALL, variants, Budget(0.0, fewest=7), PROVENANCE)
    assert [(one.row.variant, len(one.laps)) for one in result.measured] == [("naive", 7)] * 2
    assert measure_call(SMALL, variants[:1], SHORT, PROVENANCE).measured == []


def test_disturbed_calls_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And limits are measured for each dtype."""
    speeds = iter([CALM, CALM, Speed(1.5, 1.0)])
    monkeypatch.setattr(comparing, "Probe", lambda _device: lambda: next(speeds, CALM))
    monkeypatch.setattr(comparing, "measure_limits", lambda dtype, _: Limits(dtype.itemsize, 1.0))
    log: list[Call] = []
    half = replace(SMALL, dtype=torch.bfloat16)
    found = compare(
        [SMALL, half], usable_variants(["cpu"]), budget=SHORT, tolerance=0.05, on_call=log.append
    )
    assert log == [SMALL, half, half]
    assert [call for call, _ in found.calls.results] == [SMALL, half]
    assert len(found.measured) == 4
    assert found.limits == {"float32": Limits(4, 1.0), "bfloat16": Limits(2, 1.0)}


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


def test_three_digits() -> None:
    times = [milliseconds(x) for x in (0.01234, 12.34, 123.4, 1234.5)]
    assert times == ["0.0123", "12.3", "123", "1234"]
    factors = [factor(x) for x in (None, 0.123, 9.876, 23.45, 123.4)]
    assert factors == ["–", "0.12", "9.88", "23.4", "123"]


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
    write_page(comparison(TIMES), path)
    assert "Slower than a peer" not in path.read_text(encoding="utf-8")


def scaled(one: Measured, slowdown: float) -> Measured:
    return replace(one, laps=tuple(slowdown * lap for lap in one.laps))


def test_a_saved_run_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = [measured("cpu", 2.0), measured("sdpa", 3.0, "fwd+bwd")]
    save(path, run)
    found = load(path)
    assert [one.laps for one in found] == [one.laps for one in run]
    assert [row_values(one.row) for one in found] == [row_values(one.row) for one in run]


def test_other_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    head = '{"format": "transformer_kernels.bench 1"'
    empty = '"measured": [{"row": {}, "laps": [1]}]'
    for text in ("", "[]", "{}", '{"format": "other"}', f"{head}}}", f"{head}, {empty}}}"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"run\.json is not a run saved by `bench --save`"):
            load(path)
    save(path, [replace(measured("cpu", 2.0), laps=())])
    with pytest.raises(ValueError, match="a measurement without rounds"):
        load(path)


def test_changes_beyond_the_noise_are_found() -> None:
    before = [measured("cpu", 2.0, rounds=21), measured("naive", 9.0, rounds=21)]
    for speed, verdict in ((1.2, "slower"), (0.8, "faster"), (1.01, "same")):
        slower, same = changes(before, [scaled(before[0], speed), before[1]])
        if speed < 1.0:
            slower, same = same, slower
        assert (slower.row.variant, slower.verdict) == ("cpu", verdict)
        assert slower.low < slower.ratio < slower.high
        assert slower.ratio == pytest.approx(speed)
        assert (same.row.variant, same.verdict) == ("naive", "same")


def test_noise_larger_than_the_change_hides_it() -> None:
    before = replace(measured("cpu", 2.0), laps=(1.0, 2.0, 3.0, 1.2, 2.8))
    (change,) = changes([before], [scaled(before, 1.1)])
    assert change.verdict == "same"


def test_slower_machine_is_no_change() -> None:
    """Times are divided by those of torch's SDPA in the same round."""
    before = [measured("cpu", 2.0), measured("sdpa", 3.0)]
    after = [scaled(one, 1.5) for one in before]
    found = {change.row.variant: change for change in changes(before, after)}
    assert found["cpu"].verdict == "same"
    assert found["cpu"].by_control
    assert found["sdpa"].verdict == "slower"
    assert not found["sdpa"].by_control


def test_other_calls_and_directions_are_not_compared() -> None:
    before = measured("cpu", 2.0)
    assert changes([before], [measured("cpu", 2.0, "fwd+bwd"), measured("sdpa", 2.0)]) == []
    other = replace(before, row=replace(before.row, N=5))
    assert changes([before], [other]) == []
    assert len(changes([before], [other, before])) == 1
