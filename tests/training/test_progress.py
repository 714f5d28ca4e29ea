"""Tests of the progress bar."""

from __future__ import annotations

import pytest

from transformer_kernels.training import CurveRow, progress_bar


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


def test_missing_rich_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    refused = pytest.raises(ImportError, match=r"rich is not installed: pip install .*\[train\]")
    with refused, progress_bar(1):
        pass
