"""Tests of the command line as a whole: list of commands, errors and exit status."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_kernels as tk
from transformer_kernels import cli
from transformer_kernels.cli.common import UserError

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
