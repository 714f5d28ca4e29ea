"""Tests of learning curves: as CSV, as a picture, and while training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from transformer_kernels.training import CurveRow, plot_curves, progress_bar, read_curve
from transformer_kernels.training.curves import append_to_curve, rewrite_curve

ROWS = [
    CurveRow(1, 48, 0.1, 5.123456789012345, None, None, 480.0),
    CurveRow(2, 96, 0.30000000000000004, 4.5, 4.25, 6.131387258, 240.0),
]


def test_csv_round_trip_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    rewrite_curve(path, ())
    for row in ROWS:
        append_to_curve(path, row)
    assert read_curve(path) == ROWS
    header = path.read_text().splitlines()[0]
    assert header == "step,tokens,seconds,train_loss,val_loss,score,tokens_per_s"
    rewrite_curve(path, ROWS[:1])
    assert read_curve(path) == ROWS[:1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    path.symlink_to("/dev/full")
    ways: tuple[Callable[[], None], ...] = (
        lambda: append_to_curve(path, ROWS[0]),
        lambda: rewrite_curve(path, ROWS),
        lambda: plot_curves({"eager": ROWS}, path),
    )
    for write in ways:
        with pytest.raises(OSError, match="No space left on device") as caught:
            write()
        assert caught.value.filename == str(path)


@pytest.mark.parametrize("text", ["", "step\n1\n", "{header}\n1,2\n", "{header}\nx,,,,,,\n", "\0"])
def test_file_that_is_not_a_curve_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(text.format(header=",".join(CurveRow._fields)))
    with pytest.raises(ValueError, match=r"curve\.csv is not a curve: "):
        read_curve(path)


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_format_follows_the_suffix(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"curve.{suffix}"
    plot_curves({"eager": ROWS, "fused": ROWS[1:]}, path)
    assert path.read_bytes().startswith(magic)


def test_progress_bar_shows_steps_and_validations(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2, label="fused", unit="bytes", score="bits/byte") as on_row:
        on_row(CurveRow(1, 48, 0.1, 5.0, None, None, 480.0))
        on_row(CurveRow(2, 96, 12.2, 4.5, 4.25, 6.131, 12345.0))
    out, err = capsys.readouterr()
    assert out == ""
    for figure in ("fused: step      2", "held-out loss 4.250", "6.131 bits/byte", "12 s"):
        assert figure in err
    for figure in ("2/2", "loss 4.500", "12,345 bytes/s"):
        assert figure in err


def test_missing_library_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"matplotlib is not installed: pip install .*\[train\]"):
        plot_curves({}, tmp_path / "curve.png")
    with pytest.raises(ImportError, match=r"rich .* \[?.*\[train\]"), progress_bar(1):
        pass
