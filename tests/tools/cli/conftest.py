"""Fixtures of the tests that train from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runtime import one_thread
from transformer_kernels import cli


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Restores the number of threads, which the runs set to one."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text to train on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"row, row, row your boat number {n}\n" for n in range(300)))
    return path


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Function that runs a command, checks that it fails with one line, and returns that line."""

    def line(words: str, *others: object) -> str:
        capsys.readouterr()
        assert cli.main([*words.split(), *map(str, others)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("error: ")
        return err.removeprefix("error: ").strip()

    return line
