"""Tests of learning curves as CSV, tensor and picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from transformer_kernels.training import CurveRow, curves, plot_curves, read_curve
from transformer_kernels.training.curves import (
    append_to_curve,
    rewrite_curve,
    rows_from_tensor,
    rows_to_tensor,
    start_curve,
)

ROWS = [
    CurveRow(1, 48, 0.1, 5.123456789012345, None, None, 480.0),
    CurveRow(2, 96, 0.30000000000000004, 4.5, 4.25, 6.131387258, 240.0),
]


def test_csv_round_trip_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    start_curve(path)
    for row in ROWS:
        append_to_curve(path, row)
    assert read_curve(path) == ROWS
    header = path.read_text().splitlines()[0]
    assert header == "step,tokens,seconds,train_loss,val_loss,score,tokens_per_s"
    rewrite_curve(path, ROWS[:1])
    assert read_curve(path) == ROWS[:1]


def test_start_curve_does_not_overwrite_a_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        start_curve(path)
    assert path.read_text() == "precious"


def test_tensor_round_trip_is_exact() -> None:
    assert rows_from_tensor(rows_to_tensor(ROWS)) == ROWS
    assert rows_from_tensor(rows_to_tensor([])) == []


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_format_follows_the_suffix(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"curve.{suffix}"
    plot_curves({"eager": ROWS, "fused": ROWS[1:]}, path)
    assert path.read_bytes().startswith(magic)


def test_missing_matplotlib_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install transformer_kernels\[train\]"):
        curves.plot_curves({}, tmp_path / "curve.png")
