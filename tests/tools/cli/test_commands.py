"""The command line as a whole, and the commands `bench` and `demo`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels import cli
from transformer_kernels.bench import VARIANTS, Attend, Case, Row, read_rows
from transformer_kernels.cli import demo as demo_command
from transformer_kernels.cli.common import UserError
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

ROOT = Path(__file__).parents[3]


class Failing:
    """A command that raises the given error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def add_parser(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        subparsers.add_parser("fail").set_defaults(run=self.run)

    def run(self, args: argparse.Namespace) -> int:
        raise self.error


@pytest.mark.quick
def test_info_prints_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out == f"{tk.info()}\n"


def test_user_error_prints_one_line_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Failing(UserError("no such file: a.txt")),))
    assert cli.main(["fail"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: no such file: a.txt\n"
    assert captured.out == ""


def test_other_errors_propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Failing(RuntimeError("a defect")),))
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["fail"])


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: transformer-kernels" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for command in ("info", "train", "evaluate", "generate", "demo"):
        assert f"\n    {command} " in text


@pytest.mark.quick
def test_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "transformer_kernels", "--version"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == f"{tk.__version__}\n"


def test_closed_output_pipe_exits_with_141_and_no_traceback() -> None:
    """The read end of the pipe is closed before the command writes."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "transformer_kernels", "info"],
        stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=120,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


SMALL = ["--shape", "1,2,1,8,8,16", "--seconds", "0.01", "--tolerance", "inf"]


@pytest.fixture(autouse=True)
def small_limits(without_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the machine and the probe, in less time."""
    for module in ("limits", "steadiness"):
        monkeypatch.setattr(f"transformer_kernels.bench.{module}.SIDES", {"cpu": 32})
        monkeypatch.setattr(f"transformer_kernels.bench.{module}.BYTES", {"cpu": 2**14})


def bench(out: Path, *words: str) -> int:
    return cli.main(["bench", *SMALL, "--out", str(out), *words])


@pytest.mark.quick
def test_table_rows_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert bench(out, "--mask", "full", "--mask", "window:3", "--dtype", "bfloat16") == 0
    printed = capsys.readouterr().out
    assert "B 1, H 2/1, S 8, D 16, window:3, bfloat16, forward + backward" in printed
    assert str(out / "report.html") in printed
    rows = read_rows(out / "rows.csv")
    assert [(row.mask, row.direction, row.variant, row.dtype) for row in rows] == [
        (mask, direction, variant, "bfloat16")
        for mask in ("full", "window:3")
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    ]
    assert "fused (cpu)" in (out / "report.html").read_text(encoding="utf-8")


def test_peers_and_passes_are_chosen(tmp_path: Path) -> None:
    assert bench(tmp_path, "--against", "sdpa", "--pass", "backward", "--pass", "backward") == 0
    rows = read_rows(tmp_path / "rows.csv")
    assert [(row.direction, row.variant, row.mask) for row in rows] == [
        ("bwd", "sdpa", "causal"),
        ("bwd", "cpu", "causal"),
    ]


def test_shapes_of_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"n_head": 2, "n_embd": 32, "n_positions": 16}), encoding="utf-8")
    words = ["bench", "--model", str(config), "--batch", "3", *SMALL[2:], "--out", str(tmp_path)]
    assert cli.main(words) == 0
    rows = read_rows(tmp_path / "rows.csv")
    assert list(dict.fromkeys((r.case, r.B, r.M, r.N, r.D, r.direction) for r in rows)) == [
        ("model, prefill", 3, 16, 16, 16, "fwd"),
        ("model, prefill", 3, 16, 16, 16, "fwd+bwd"),
        ("model, decoding", 3, 1, 16, 16, "fwd"),
    ]


def test_saved_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert bench(tmp_path, "--save", str(before)) == 0
    saved = json.loads(before.read_text(encoding="utf-8"))
    for path, of_fused in ((before, 2.0), (after, 3.0)):
        for one in saved["measured"]:
            one["laps"] = [of_fused if one["row"]["variant"] == "cpu" else 1.0] * 5
        path.write_text(json.dumps(saved), encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["bench", "--compare", str(before), str(after)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("slower") == 2
    assert "4 of 6 figures that both runs have did not change." in printed
    assert bench(tmp_path, "--compare", str(before)) == 0
    assert "of 6 figures that both runs have" in capsys.readouterr().out


def test_disturbed_calls_are_shown_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every probe after the first one is slower than the last."""
    from transformer_kernels.bench.comparison import run
    from transformer_kernels.bench.steadiness import Speed

    seconds = iter(range(1, 100))
    monkeypatch.setattr(run, "Probe", lambda _device: lambda: Speed(float(next(seconds)), 1.0))
    assert bench(tmp_path, "--tolerance", "5") == 0
    printed = capsys.readouterr().out
    assert "slower than usual" in printed.partition("Disturbed:")[2]
    assert len(read_rows(tmp_path / "rows.csv")) == 6


def test_failure_of_ours_is_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: Case) -> Attend:
        right = VARIANTS["sdpa"].attend_for(case)
        return lambda q, k, v: right(q, k, v) + 0.5

    monkeypatch.setitem(VARIANTS, "cpu", replace(VARIANTS["cpu"], attend_for=wrong))
    assert bench(tmp_path) == 1
    assert "fused (cpu) FAILED: cpu, : o (torch.float32): error 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "1,2"], "expected B,H_q,H_kv,M,N,D[,D_v], such as 1,32,8,2048,2048,128"),
        (["--mask", "casual"], "expected full, causal, window:W"),
        (["--mask", "padding:3,4"], "padding needs 1 lengths of at most 8"),
        (["--mask", "padding:nowhere"], "nowhere: No such file or directory"),
        (["--model", "nowhere.json"], "--model has its own shapes and masks"),
        (["--batch", "2"], "--batch and --context need --model"),
        (["--against", "sdpa,fa5"], "expected names of naive, sdpa, "),
        (["--against", "flex"], "--against flex: not on cpu: torch finds no CUDA device"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device"),
        (["--seconds", "0"], "--seconds must be positive and finite, got 0.0"),
        (["--tolerance", "0"], "--tolerance must be positive, got 0.0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--compare", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["--compare", "a", "b", "c"], "No such file or directory"),
    ],
)
def test_invalid_options(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    error_line: Callable[..., str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert message in error_line("bench", *SMALL, "--out", tmp_path, *words)
    assert not (tmp_path / "rows.csv").exists()


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
        for case in demo_command.cases(QUICK)
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    }
    assert all(row.error < (1e-5 if row.dtype == "float32" else 2e-2) for row in rows)


def test_eager_and_fused_training_curves_agree(demo: Demo) -> None:
    eager, fused = (read_curve(demo.folder / f"curve-{name}.csv") for name in ("eager", "fused"))
    assert len(eager) == QUICK.eager_steps < len(fused) == QUICK.steps
    for a, b in zip(eager, fused, strict=False):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-4)


def test_pictures_and_a_text_sample_are_written(demo: Demo) -> None:
    for name in ("attention.png", "training.png"):
        assert (demo.folder / name).read_bytes().startswith(b"\x89PNG")
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


def test_unwritable_output_folder_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_line: Callable[..., str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    line = error_line("demo --quick --out", taken / "deeper")
    assert line.startswith(f"--out {taken / 'deeper'} cannot be written")
    assert taken.read_text() == "mine"

    def touch(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "touch", touch)
    out = tmp_path / "out"
    line = error_line("demo --quick --out", out)
    assert line == f"--out {out} cannot be written: Permission denied"
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("package", ["rich", "matplotlib", "tokenizers"])
def test_missing_package_error_names_the_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_line: Callable[..., str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "transformer_kernels.common.optional_deps.find_spec",
        lambda name: None if name == package else find(name),
    )
    line = error_line("demo --quick --out", tmp_path / "out")
    assert package in line
    assert "transformer_kernels[train]" in line
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
    results = demo_command.train_both(sizes, config, DATA, ("eager", "fused"), said.append)
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
    results = demo_command.train_both(sizes, config, DATA, ("eager", "fused"), on_step)
    assert [len(result.rows) for result in results.values()] == [3, 3]


def test_case_predicted_to_exceed_the_time_limit_is_skipped(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case of 1,024 positions takes 19 seconds, so that one of 4,096 would take 304."""

    def measure(case: Case, seconds: float) -> list[Row]:
        now[0] += 19.0 * (case.N / 1024) ** 2
        return []

    monkeypatch.setattr(demo_command, "measure", measure)
    todo = [Case(name="causal", M=n, N=n) for n in (4096, 1024, 2048)]
    measured: list[str] = []
    _, skipped = demo_command.measure_all(
        todo, replace(QUICK, attention_seconds=100.0), measured.append
    )
    assert measured == [f"causal, float32, length {n}" for n in (1024, 2048, 4096)]
    assert skipped == ["Skipped causal, float32, length 4096: it would take about 304 s more."]
