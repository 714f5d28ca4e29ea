"""The benchmarks of divided sequences, on two processes at toy sizes."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import torchrun


def output_of(*words: str) -> str:
    done = torchrun(2, "-m", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_context_parallel() -> None:
    text = output_of(
        "benchmarks.runner.context_parallel", "--seq", "256", "--window", "40", "--rounds", "1"
    )
    names = ("ring, zigzag", "ring, contiguous", "ring, contiguous, window 40", "all-to-all")
    for name in names:
        assert re.search(rf"^\| 256 \| {name} \| forward \| \d+ \| \d+ \| ", text, re.MULTILINE)


@pytest.mark.exhaustive
def test_long_sequence() -> None:
    text = output_of("benchmarks.runner.long_sequence", "--tokens", "4096", "--heads", "2")
    window, strided = text.splitlines()[-2:]
    assert re.match(r"window of 16 +0\.390% .* MiB +\d\.\de-0\d$", window)
    assert re.match(r"strided by 16 blocks of 4 +4\.\d+% .* MiB +\d\.\de-0\d$", strided)


@pytest.mark.exhaustive
def test_documents() -> None:
    text = output_of("benchmarks.runner.documents", "100", "3", "1", "24")
    assert "128 tokens, 4 documents" in text
    row = r" +forward +\d+ ms \d\.\d\dx +both +\d+ ms \d\.\d\dx +balance "
    for name, balance in (
        ("one process", "1"),
        ("ring_attention_varlen", "1.0"),
        ("zigzag row", "1."),
    ):
        assert re.search(name + row + re.escape(balance), text)
