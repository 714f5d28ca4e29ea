"""The command `train`: its options, its output files, and one-line errors."""

from __future__ import annotations

import argparse
import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from tests.support.processes import torchrun
from transformer_kernels import cli
from transformer_kernels.cli import train
from transformer_kernels.cli.train import add_options, given_options, with_options
from transformer_kernels.nn import AttnImplementation
from transformer_kernels.training import (
    PRESETS,
    TrainConfig,
    Trainer,
    read_curve,
)
from transformer_kernels.training.distributed import DistributedContext
from transformer_kernels.training.trainer import Step


@dataclass(frozen=True)
class Inner:
    size: int | None = None
    """Size in 10% of a
    byte."""
    peak: float = 0.5


@dataclass(frozen=True)
class Outer:
    inner: Inner
    kind: Literal["thin", "wide"] = "thin"
    """Form"""
    betas: tuple[float, float] = (0.9, 0.99)
    on: bool = True
    name: str = "cpu"
    hidden: int = 3


OUTER = Outer(Inner())


def parsed(words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser, OUTER, without=frozenset({"hidden"}))
    return given_options(parser.parse_args(words.split()), OUTER)


def test_only_given_options_are_parsed_with_the_types_of_their_fields() -> None:
    assert parsed("") == {}
    words = "--size 4 --lr 2 --kind wide --betas 0.5 0.25 --no-on --name cuda"
    assert with_options(OUTER, parsed(words)) == Outer(
        Inner(4, 2.0), "wide", (0.5, 0.25), on=False, name="cuda", hidden=3
    )
    assert with_options(OUTER, parsed("--peak 3")) == replace(OUTER, inner=Inner(peak=3.0))


@pytest.mark.parametrize("words", ["--kind big", "--size 1.5", "--betas 1", "--hidden 4"])
def test_value_of_another_type_is_refused(words: str) -> None:
    with pytest.raises(SystemExit):
        parsed(words)


def test_help_is_the_docstring_of_the_field_and_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, OUTER)
    text = " ".join(parser.format_help().split())
    assert "--size N Size in 10% of a byte (default: None)" in text
    assert "--kind {thin,wide} Form (default: thin)" in text
    assert "--betas N N (default: 0.9 0.99)" in text
    assert "--lr N, --peak N (default: 0.5)" in text


def config(kind: str, words: str) -> TrainConfig:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    train.add_parser(subparsers)
    train.add_models(subparsers.choices["train"])
    return train.configured(parser.parse_args(["train", kind, *words.split()]))


@pytest.mark.parametrize("kind", PRESETS)
def test_options_of_every_model_override_its_preset(kind: str) -> None:
    for name, preset in PRESETS[kind].items():
        assert config(kind, f"--preset {name}") == preset
    assert config(kind, "") == next(iter(PRESETS[kind].values()))
    changed = config(kind, "--width 240 --batch 4 --accumulate 2 --precision bfloat16 --recompute")
    assert changed.task.model.width == 240
    assert (changed.batch, changed.accumulate) == (4, 2)
    assert (changed.precision, changed.recompute) == ("bfloat16", True)


def test_fewer_steps_shorten_the_warmup_unless_it_is_given() -> None:
    demo = PRESETS["generator"]["demo"]
    words = "--preset demo --layers 3 --dropout 0.1 --batch 7 --lr 0.5 --steps 100"
    assert config("generator", words) == replace(
        demo,
        task=replace(demo.task, model=replace(demo.task.model, layers=3, dropout=0.1)),
        batch=7,
        steps=100,
        schedule=replace(demo.schedule, peak=0.5, warmup=10),
    )
    assert config("generator", f"{words} --warmup 25").schedule.warmup == 25
    assert config("translator", "--smoothing 0.3").task.smoothing == 0.3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [
        ("classifier", "classes"),
        ("lookup", "rows"),
        ("lookup", "vocabulary"),
        ("sparse", "vocabulary"),
        ("bert", "segments"),
    ],
)
def test_sizes_that_the_data_determines_are_no_options(
    kind: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", kind, "--help"])
    text = capsys.readouterr().out
    assert f"--{hidden}" not in text
    assert "--width N" in text
    assert f"--preset {{{','.join(PRESETS[kind])}}}" in text
    assert f"--attn-implementation {{{','.join(get_args(AttnImplementation))}}}" in text


TINY = "--layers 1 --width 8 --heads 2 --context 12 --batch 2 --steps 6 --eval-every 3 --threads 1"


def run(*words: object) -> int:
    return cli.main(["train", "generator", *" ".join(map(str, words)).split()])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


ErrorLine = Callable[..., str]


@pytest.fixture
def refused(error_line: ErrorLine) -> ErrorLine:
    """Function that runs the command, which fails, and returns the line of its error."""
    return lambda *words: error_line("train generator " + " ".join(map(str, words)))


@pytest.mark.quick
def test_run_writes_checkpoint_curve_and_picture(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: ErrorLine
) -> None:
    """They are not overwritten."""
    out = tmp_path / "new" / "run"
    assert run(TINY, "--data", text, "--out", out) == 0
    assert len(read_curve(out / "curve.csv")) == 6
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "bits/byte" in printed.out
    for path in (out / "checkpoint-6", out / "curve.csv", out / "curve.png"):
        assert path.exists()
        assert f"  {path}\n" in printed.out
    assert "held-out loss" in printed.err
    before = contents(out)
    assert refused(TINY, "--data", text, "--out", out).startswith(f"{out} already holds a run")
    assert contents(out) == before


@pytest.mark.quick
def test_interrupted_run_resumes_with_identical_losses(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(TINY, "--dropout 0.1 --data", text, "--out", whole) == 0

    step = Trainer.step

    def step_and_interrupt(trainer: Trainer) -> Step:
        if trainer.steps_done == 1:
            signal.raise_signal(signal.SIGINT)
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step_and_interrupt)
        assert run(TINY, "--dropout 0.1 --data", text, "--out", broken) == 130
    assert f"--resume {broken}" in capsys.readouterr().out
    assert len(read_curve(broken / "curve.csv")) == 2

    assert run("--threads 1 --resume", broken) == 0
    losses = [
        [(row.train_loss, row.val_loss) for row in read_curve(folder / "curve.csv")]
        for folder in (whole, broken)
    ]
    assert losses[0] == losses[1]


def test_deterministic_option_is_passed_to_torch(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    assert run(TINY, "--data", text, "--out", tmp_path / "a") == 0
    assert calls == []
    assert run(TINY, "--deterministic --data", text, "--out", tmp_path / "b") == 0
    assert calls == [True]


def test_unusable_data_is_a_one_line_error(tmp_path: Path, refused: ErrorLine) -> None:
    missing = tmp_path / "missing.txt"
    line = refused(TINY, "--data", missing, "--out", tmp_path / "run")
    assert line == f"{missing}: No such file or directory"
    assert "Is a directory" in refused(TINY, "--data", tmp_path, "--out", tmp_path / "run")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    line = refused(TINY, "--data", short, "--out", tmp_path / "run")
    assert f"{short} is too short: a context of 12 needs 13 bytes" in line
    assert not (tmp_path / "run").exists()


def test_unwritable_output_folder_is_a_one_line_error(
    text: Path, tmp_path: Path, refused: ErrorLine
) -> None:
    below_a_file = text / "run"
    line = refused(TINY, "--data", text, "--out", below_a_file)
    assert line == f"{below_a_file}: Not a directory"
    assert "File exists" in refused(TINY, "--data", text, "--out", text)


def test_settings_cannot_be_changed_on_resume(
    text: Path, tmp_path: Path, refused: ErrorLine
) -> None:
    out = tmp_path / "run"
    assert run(TINY, "--data", text, "--out", out) == 0
    for option in ("--steps 9", "--lr 0.1", "--attn-implementation eager", "--out x"):
        line = refused(option, "--resume", out)
        assert line.startswith(f"{option.split()[0]} cannot be given with --resume")
    other = tmp_path / "other.txt"
    other.write_bytes(bytes(2000))
    line = refused("--data", other, "--resume", out)
    assert "was trained on other data" in line


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--steps 0", "steps must be a whole number of at least 1, got 0"),
        ("--heads 3", "width must be a multiple of heads in the narrow form, got 8 and 3"),
        ("--dropout 1.5", "dropout must be at least 0 and below 1, got 1.5"),
        ("--lr -1", "peak must be above 0 and finite, got -1.0"),
        ("--threads 0", "--threads must be at least 1 and at most "),
        ("--threads 100000", "--threads must be at least 1 and at most "),
        ("--device abacus", "device 'abacus' cannot be used"),
        ("--device meta", "device 'meta' cannot be used"),
        ("--device hpu", "device 'hpu' cannot be used"),
        ("--lr nan", "peak must be above 0 and finite, got nan"),
        ("--seed 9223372036854775808", "seed must be at least 0 and below 2**63, got 9223"),
    ],
)
def test_option_out_of_range_is_a_one_line_error(
    text: Path, tmp_path: Path, refused: ErrorLine, option: str, message: str
) -> None:
    line = refused(TINY, option, "--data", text, "--out", tmp_path / "run")
    assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory: try a smaller --batch or model, a larger --accumulate"),
        (RuntimeError("x: can't allocate memory: y"), "out of memory: try a smaller --batch"),
        (OSError(errno.EFBIG, "File too large", "curve.csv"), "curve.csv: File too large"),
        (FloatingPointError("the loss is nan"), "the loss is nan"),
    ],
)
def test_failure_while_training_is_a_one_line_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], error: Exception, message: str,
) -> None:  # fmt: skip
    def failing(trainer: Trainer) -> Step:
        raise error

    monkeypatch.setattr(Trainer, "step", failing)
    assert run(TINY, "--data", text, "--out", tmp_path / "run") == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_defects_are_not_hidden(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(trainer: Trainer) -> Step:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(RuntimeError, match="a defect"):
        run(TINY, "--data", text, "--out", tmp_path / "run")


def test_model_too_large_for_the_machine_is_a_one_line_error(
    text: Path, tmp_path: Path, refused: ErrorLine
) -> None:
    words = f"{TINY} --width 1000000000000"
    assert refused(words, "--data", text, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_invalid_checkpoint_is_not_resumed(text: Path, tmp_path: Path, refused: ErrorLine) -> None:
    assert str(text) in refused("--resume", text)
    missing = tmp_path / "missing"
    assert refused("--resume", missing) == f"{missing}: No such file or directory"


@pytest.mark.parametrize("option", ["--context-parallel 2", "--shard"])
def test_division_needs_torchrun(
    text: Path, tmp_path: Path, refused: ErrorLine, option: str
) -> None:
    line = refused(TINY, option, "--data", text, "--out", tmp_path / "run")
    assert "torchrun --nproc-per-node N -m transformer_kernels train" in line
    assert line == refused(option, "--resume", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("grid", "command"),
    [
        (DistributedContext(), "python -m transformer_kernels train x"),
        (DistributedContext(0, 2), "torchrun --nproc-per-node 2 -m transformer_kernels train x"),
        (
            DistributedContext(0, 4, 2, sharded=True),
            "torchrun --nproc-per-node 4 -m transformer_kernels train x --context-parallel 2 "
            "--shard",
        ),
    ],
)
def test_printed_command_starts_the_same_processes(grid: DistributedContext, command: str) -> None:
    assert train._launch(grid, "train x") == command


@pytest.mark.exhaustive
def test_processes_divide_a_run_resume_it_and_generate(text: Path, tmp_path: Path) -> None:
    """Two processes by torchrun; every rank ends with one line where an option is invalid."""
    out = tmp_path / "run"

    def two(*words: object) -> subprocess.CompletedProcess[str]:
        options = " ".join(map(str, words)).split()
        return torchrun(2, "-m", "transformer_kernels", "train", "generator", *options)

    done = two("--context-parallel 3 --data", text, "--out", out)
    assert done.returncode != 0
    assert done.stderr.count("error: the number of processes must be a multiple of context_p") == 2
    done = two(TINY, "--heads 2 --context 14 --context-parallel 2 --data", text, "--out", out)
    assert done.returncode != 0
    assert done.stderr.count("error: context must be a multiple of 4 to be divided over 2") == 2
    assert not out.exists()
    done = two(TINY, "--context-parallel 2 --shard --data", text, "--out", out)
    assert done.returncode == 0, done.stderr
    assert out.exists()
    checkpoint = out
    done = two("--context-parallel 2 --threads 1 --resume", checkpoint)
    assert done.returncode == 0, done.stderr
    assert run("--threads 1 --resume", checkpoint) == 0
    words = ["generate", "--checkpoint", str(checkpoint), "--length", "5"]
    assert cli.main(words) == 0


def test_missing_package_error_names_the_extra(
    text: Path, monkeypatch: pytest.MonkeyPatch, refused: ErrorLine
) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    assert "pip install transformer_kernels[train]" in refused(TINY, "--data", text)


def test_exit_status_of_a_new_process(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    done = subprocess.run(
        [sys.executable, "-m", "transformer_kernels", "train", "generator", "--data", missing],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {missing}: No such file or directory\n"
