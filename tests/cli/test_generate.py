"""Tests of the command `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.threads import one_thread
from transformer_kernels import cli
from transformer_kernels.models import GeneratorConfig, TextGenerator
from transformer_kernels.training import (
    ByteWindows,
    GeneratorTask,
    Schedule,
    TrainConfig,
    corpus_from_bytes,
    train,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TextGenerator]:
    """Checkpoint and model that have memorised one line."""
    out = tmp_path_factory.mktemp("run")
    config = TrainConfig(
        task=GeneratorTask(model=GeneratorConfig(layers=1, width=32, heads=2, context=16)),
        steps=60,
        batch=8,
        schedule=Schedule(peak=2e-2, warmup=5),
        eval_every=60,
    )
    text = "né à Paris, ".encode() * 60
    with one_thread():
        result = train(config, ByteWindows(corpus_from_bytes(text, "a line"), 16), out=out)
    assert isinstance(result.model, TextGenerator)
    return out / "checkpoint.pt", result.model


@pytest.mark.quick
def test_prompt_is_continued(
    trained: tuple[Path, TextGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = trained
    words = ["--prompt", "né à Pa", "--length", "31", "--temperature", "0"]
    assert cli.main(["generate", "--checkpoint", str(path), *words]) == 0
    assert capsys.readouterr().out == "né à Paris, né à Paris, né à Paris\n"


def test_seed_and_temperature_are_passed_to_the_model(
    trained: tuple[Path, TextGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = trained
    expected = model.generate(b"P", 40, temperature=5.0, generator=torch.Generator().manual_seed(7))
    words = ["--prompt", "P", "--length", "40", "--temperature", "5", "--seed", "7"]
    for attention in ("eager", "fused", "sdpa"):
        arguments = [
            "generate",
            "--checkpoint",
            str(path),
            *words,
            "--attn-implementation",
            attention,
        ]
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out == "P" + expected.decode(errors="replace") + "\n"


def error_line(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["generate", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").strip()


def test_unreadable_checkpoint_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, notes, other = (tmp_path / name for name in ("missing.pt", "notes.pt", "other.pt"))
    notes.write_text("not a checkpoint")
    torch.save({"model": {}}, other)
    line = error_line(capsys, "--checkpoint", missing)
    assert line == f"{missing}: No such file or directory"
    line = error_line(capsys, "--checkpoint", notes)
    assert line == f"{notes} is not a checkpoint, or it is damaged"
    line = error_line(capsys, "--checkpoint", other)
    assert line == f"{other} is not a checkpoint of transformer_kernels"


def test_prompt_may_be_any_bytes(
    trained: tuple[Path, TextGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    """An argument of the command line that is not UTF-8 has surrogates."""
    path, _ = trained
    words = ["--prompt", "a\udcff", "--length", "0"]
    assert cli.main(["generate", "--checkpoint", str(path), *words]) == 0
    assert capsys.readouterr().out == "a\ufffd\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--prompt", "", "prompt must have at least one token"),
        ("--length", "-1", "length must be at least 0, got -1"),
        ("--temperature", "-1", "temperature must be at least 0 and finite, got -1.0"),
        ("--seed", "-1", "seed must be at least 0 and below 2**63, got -1"),
        ("--seed", str(2**70), "seed must be at least 0 and below 2**63"),
    ],
)
def test_option_out_of_range_is_a_one_line_error(
    trained: tuple[Path, TextGenerator],
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
    message: str,
) -> None:
    path, _ = trained
    assert message in error_line(capsys, "--checkpoint", path, option, value)
