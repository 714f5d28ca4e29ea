from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from transformer_kernels import cli
from transformer_kernels.bench import Case, Row, read_rows
from transformer_kernels.cli import demo as command
from transformer_kernels.cli.demo import PROMPT, QUICK
from transformer_kernels.training import (
    PRESETS,
    Tokens,
    TrainConfig,
    corpus_from_bytes,
    read_curve,
    train,
)
from transformer_kernels.training.data import TokenWindows


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
        patch.setattr("transformer_kernels.bench.peak_extra_bytes", lambda *_: None)
        assert cli.main(["demo", "--quick", "--out", str(out)]) == 0
    return Demo(out, text.getvalue())


@pytest.mark.quick
def test_csv_has_a_row_for_every_case_direction_and_variant(demo: Demo) -> None:
    rows = read_rows(demo.folder / "attention.csv")
    assert {(row.case, row.N, row.dtype, row.direction, row.variant) for row in rows} == {
        (case.name, case.N, case.dtype_name, direction, variant)
        for case in command.cases(QUICK)
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    }
    assert all(row.error < (1e-5 if row.dtype == "float32" else 2e-2) for row in rows)


def test_eager_and_fused_training_curves_agree(demo: Demo) -> None:
    eager, fused = (read_curve(demo.folder / f"curve-{name}.csv") for name in ("eager", "fused"))
    assert len(eager) == QUICK.eager_steps < len(fused) == QUICK.steps
    for a, b in zip(eager, fused, strict=False):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-4)


@pytest.mark.parametrize("name", ["attention.png", "training.png"])
def test_pictures_are_written(demo: Demo, name: str) -> None:
    assert (demo.folder / name).read_bytes().startswith(b"\x89PNG")


def test_text_sample_is_written(demo: Demo) -> None:
    sample = (demo.folder / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith(PROMPT.decode())
    assert len(sample) > len(PROMPT)


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


DATA = TokenWindows(corpus_from_bytes(b"To be, or not to be: " * 60, "a line"), Tokens(), 32)


@pytest.fixture
def config() -> TrainConfig:
    preset = PRESETS["gpt2"]["demo"]
    task = replace(preset.task, model=replace(preset.task.model, **QUICK.model))
    return replace(preset, task=task, steps=5, batch=2, eval_every=5, eval_batches=2)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Fake clock: a list of one number, which advances by a millisecond per call."""
    seconds = [0.0]

    def clock() -> float:
        seconds[0] += 0.001
        return seconds[0]

    monkeypatch.setattr("time.perf_counter", clock)
    return seconds


def test_alternating_runs_have_the_losses_of_separate_runs(config: TrainConfig) -> None:
    """After two steps, only the last run trains on."""
    said: list[str] = []
    sizes = replace(QUICK, eager_steps=2)
    results = command.train_both(sizes, config, DATA, ("eager", "fused"), said.append)
    assert len(results["eager"].rows) == 2
    for name in ("eager", "fused"):
        alone = train(replace(config, attn_implementation=name), DATA)
        assert results[name].losses == alone.losses[: len(results[name].rows)]
    assert results["fused"].finished
    assert results["fused"].score == alone.score
    assert len(said) == 5
    assert "eager" in said[1]
    assert "eager" not in said[2]


def test_time_limit_ends_the_training(config: TrainConfig, now: list[float]) -> None:
    """Each round of steps takes one second."""

    def on_step(words: str) -> None:
        now[0] += 1.0

    sizes = replace(QUICK, training_seconds=2.5)
    results = command.train_both(sizes, config, DATA, ("eager", "fused"), on_step)
    assert [len(result.rows) for result in results.values()] == [3, 3]


def test_case_predicted_to_exceed_the_time_limit_is_skipped(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case of 1,024 positions takes 19 seconds, so that one of 4,096 would take 304."""

    def measure(case: Case, seconds: float) -> list[Row]:
        now[0] += 19.0 * (case.N / 1024) ** 2
        return []

    monkeypatch.setattr(command, "measure", measure)
    todo = [Case(name="causal", M=n, N=n) for n in (4096, 1024, 2048)]
    measured: list[str] = []
    _, skipped = command.measure_all(todo, replace(QUICK, attention_seconds=100.0), measured.append)
    assert measured == [f"causal, float32, length {n}" for n in (1024, 2048, 4096)]
    assert skipped == ["Skipped causal, float32, length 4096: it would take about 304 s more."]
