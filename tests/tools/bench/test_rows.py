from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.bench.example import CASE, row
from transformer_kernels.bench.rows import COLUMNS, append_rows, read_rows, write_rows


def test_the_columns_are_fixed() -> None:
    assert COLUMNS == (
        "date", "commit", "device", "torch", "triton", "cuda", "threads", "suite", "case", "dtype",
        "B", "H_q", "H_kv", "M", "N", "D", "D_v", "mask", "visible", "dropout_p", "direction",
        "variant", "median_ms", "p20_ms", "p80_ms", "tflops", "gbytes_s", "peak_mib", "error",
    )  # fmt: skip


def test_rates_come_from_the_median() -> None:
    made = row()
    assert made.tflops == pytest.approx(CASE.operations("fwd") / 2e-3 / 1e12)
    assert made.gbytes_s == pytest.approx(CASE.traffic("fwd") / 2e-3 / 1e9)
    assert made.peak_mib == 3.0
    assert made.visible == 10 / 16


def test_a_row_has_the_dropout_of_its_case() -> None:
    assert row(case=replace(CASE, dropout_p=0.25)).dropout_p == 0.25


def test_rows_survive_a_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first, second = row(), row(peak_bytes=None)
    write_rows(path, [first])
    append_rows(path, [second])
    found = read_rows(path)
    assert [(r.peak_mib, r.B, r.dtype, r.median_ms) for r in found] == [
        (3.0, 1, "float16", 2.0),
        (None, 1, "float16", 2.0),
    ]
    assert found[0] == replace(first, tflops=found[0].tflops, gbytes_s=found[0].gbytes_s)


def test_figures_without_a_meaning_survive_a_round_trip(tmp_path: Path) -> None:
    step = replace(row(), direction="step", tflops=math.nan, gbytes_s=math.nan, visible=math.nan)
    write_rows(tmp_path / "rows.csv", [step])
    (found,) = read_rows(tmp_path / "rows.csv")
    assert found.direction == "step"
    assert all(map(math.isnan, (found.tflops, found.gbytes_s, found.visible)))


def test_append_creates_the_file_and_write_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    append_rows(path, [row(), row()])
    assert len(read_rows(path)) == 2
    write_rows(path, [row()])
    assert len(read_rows(path)) == 1


def test_a_file_with_other_columns_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected the columns of Row, got a, b"):
        append_rows(path, [row()])
    assert path.read_text() == "a,b\n1,2\n"
