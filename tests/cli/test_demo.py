from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from transformer_kernels import cli
from transformer_kernels.bench import read_rows
from transformer_kernels.demo.settings import QUICK
from transformer_kernels.demo.speed import length_cases, other_cases
from transformer_kernels.training import read_curve


@dataclass(frozen=True)
class Demo:
    """Output of a quick demo: its folder, and the text printed on a terminal of 80 columns."""

    folder: Path
    text: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    out, text = tmp_path_factory.mktemp("demo") / "new" / "folder", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setenv("COLUMNS", "80")
        # Measuring takes a second for each row in a large process.
        for name in ("speed", "learning"):
            patch.setattr(f"transformer_kernels.demo.{name}.peak_extra_bytes", lambda *_: None)
        assert cli.main(["demo", "--quick", "--out", str(out)]) == 0
    return Demo(out, text.getvalue())


@pytest.mark.quick
def test_csv_has_a_row_for_every_case_direction_and_variant(demo: Demo) -> None:
    rows = read_rows(demo.folder / "attention.csv")
    cases = [*length_cases(QUICK), *other_cases(QUICK)]
    assert {(row.case, row.N, row.dtype, row.direction, row.variant) for row in rows} == {
        (case.name, case.N, case.dtype_name, direction, variant)
        for case in cases
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    }
    assert all(row.error < (1e-5 if row.dtype == "float32" else 2e-2) for row in rows)


def test_eager_and_fused_training_curves_agree(demo: Demo) -> None:
    eager, fused = (read_curve(demo.folder / f"curve-{name}.csv") for name in ("eager", "fused"))
    assert len(eager) == QUICK.limits.interleaved_steps < len(fused) == QUICK.training.steps
    for a, b in zip(eager, fused, strict=False):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-4)
        assert (a.score is None) == (b.score is None)
        if a.score is not None:
            assert a.score == pytest.approx(b.score, abs=1e-3)


@pytest.mark.parametrize("name", ["attention.png", "training.png"])
def test_pictures_are_written(demo: Demo, name: str) -> None:
    assert (demo.folder / name).read_bytes().startswith(b"\x89PNG")


def test_text_sample_is_written(demo: Demo) -> None:
    sample = (demo.folder / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith(QUICK.prompt.decode())
    assert len(sample) > len(QUICK.prompt)


def test_tables_are_printed_without_truncated_cells(demo: Demo) -> None:
    for words in (
        *("transformer_kernels", "forward + backward", "bits/byte", "naive", "fused"),
        *("padded, float32", "packed, float32", "causal, bfloat16", "packed, bfloat16"),
        *("torch SDPA", "naive bmm", "fused (cpu)", "x SDPA", "error"),
    ):
        assert words in demo.text
    assert "…" not in demo.text.split("small GPT-2")[0]


def test_output_ends_with_the_list_of_files(demo: Demo) -> None:
    after = demo.text.split("Files:")[1]
    assert [Path(line.strip()).name for line in after.split("\n") if line.strip()] == sorted(
        path.name for path in demo.folder.iterdir()
    )


def test_output_path_below_a_file_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert cli.main(["demo", "--quick", "--out", str(taken / "deeper")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --out {taken / 'deeper'} cannot be written")
    assert taken.read_text() == "mine"


def test_unwritable_output_folder_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def touch(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "touch", touch)
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 2
    expected = f"error: --out {tmp_path} cannot be written: Permission denied\n"
    assert capsys.readouterr().err == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["rich", "matplotlib", "tokenizers"])
def test_missing_package_error_names_the_extra(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "transformer_kernels.common.optional_deps.find_spec",
        lambda name: None if name == package else find(name),
    )
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert package in error
    assert "transformer_kernels[train]" in error
    assert not (tmp_path / "out").exists()
