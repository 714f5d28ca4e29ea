from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

import pytest

from transformer_kernels import cli
from transformer_kernels.bench import read_rows
from transformer_kernels.demo.settings import QUICK
from transformer_kernels.training import read_curve


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick demo."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    assert cli.main(["demo", "--quick", "--out", str(out)]) == 0
    return out


def test_it_writes_rows_of_every_length_direction_and_variant(demo: Path) -> None:
    rows = read_rows(demo / "attention.csv")
    assert {(row.N, row.direction, row.variant) for row in rows} == {
        (length, direction, variant)
        for length in QUICK.lengths
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    }
    assert all(row.error < 1e-5 and row.mask == "causal" for row in rows)


def test_naive_and_fused_learn_the_same(demo: Path) -> None:
    naive, fused = (read_curve(demo / f"curve-{path}.csv") for path in ("naive", "fused"))
    assert len(naive) == len(fused) == QUICK.training.steps
    for a, b in zip(naive, fused, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-4)
    assert naive[-1].score == pytest.approx(fused[-1].score, abs=1e-3)


@pytest.mark.parametrize("name", ["attention.png", "training.png"])
def test_it_draws_pictures(demo: Path, name: str) -> None:
    assert (demo / name).read_bytes().startswith(b"\x89PNG")


def test_it_writes_a_sample(demo: Path) -> None:
    assert (demo / "sample.txt").read_text(encoding="utf-8").startswith(QUICK.prompt.decode())


def test_it_prints_tables_and_ends_by_saying_where_the_files_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for words in ("transformer_kernels", "forward + backward", "torch SDPA", "bits/byte", "fused"):
        assert words in text
    after = text.split("Files:")[1]
    assert [Path(line.strip()).name for line in after.split("\n") if line.strip()] == sorted(
        path.name for path in tmp_path.iterdir()
    )


def test_a_file_in_the_way_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert cli.main(["demo", "--quick", "--out", str(taken / "deeper")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --out {taken / 'deeper'} cannot be written")
    assert taken.read_text() == "mine"


def test_a_folder_without_permission_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def touch(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "touch", touch)
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 2
    expected = f"error: --out {tmp_path} cannot be written: Permission denied\n"
    assert capsys.readouterr().err == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_a_missing_package_is_named_with_its_extra(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "transformer_kernels.extras.find_spec",
        lambda name: None if name == package else find(name),
    )
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert package in error
    assert "transformer_kernels[train]" in error
    assert not (tmp_path / "out").exists()
