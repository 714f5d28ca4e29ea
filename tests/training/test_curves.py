"""Curves as CSV, as tensors, and as a picture."""

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


def test_csv_keeps_every_digit(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    start_curve(path)
    for row in ROWS:
        append_to_curve(path, row)
    assert read_curve(path) == ROWS
    header = path.read_text().splitlines()[0]
    assert header == "step,tokens,seconds,train_loss,val_loss,score,tokens_per_s"
    rewrite_curve(path, ROWS[:1])
    assert read_curve(path) == ROWS[:1]


def test_a_curve_is_never_started_over_another(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        start_curve(path)
    assert path.read_text() == "precious"


def test_rows_go_through_a_tensor_unchanged() -> None:
    assert rows_from_tensor(rows_to_tensor(ROWS)) == ROWS
    assert rows_from_tensor(rows_to_tensor([])) == []


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_curves_are_drawn(tmp_path: Path, ending: str, magic: bytes) -> None:
    path = tmp_path / f"curve.{ending}"
    plot_curves({"eager": ROWS, "fused": ROWS[1:]}, path)
    assert path.read_bytes().startswith(magic)


def test_a_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_kernels.optional_deps.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install transformer_kernels\[train\]"):
        curves.plot_curves({}, tmp_path / "curve.png")
