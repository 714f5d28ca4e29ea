"""Tests of the command `evaluate`, and of the other commands that use a Transformer-XL, a Sparse
Transformer, a Reformer or a Linear Transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.models import TransformerXL, TransformerXLConfig
from transformer_kernels.training import (
    ByteLanes,
    Schedule,
    TrainConfig,
    TrainingRun,
    evaluate,
    load_corpus,
    load_model,
)
from transformer_kernels.training.tasks import TransformerXLTask

TINY = (
    "--layers 1 --width 16 --heads 2 --context 12 --batch 4 --accumulate 2 --steps 40 "
    "--eval-every 20 --lr 0.02 --threads 1"
)
CONTEXT, LANES = 12, 3


def run(words: str, *others: object) -> int:
    return cli.main([*words.split(), *map(str, others)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert run(f"train transformer-xl {TINY} --memory 16 --data {text} --out", out / "xl") == 0
    return out / "xl"


@pytest.fixture
def sensitive(text: Path, tmp_path: Path) -> Path:
    """A checkpoint with large random weights, so that every option changes the printed digits."""
    model = TransformerXLConfig(layers=1, width=16, heads=2, context=CONTEXT, memory=16, dropout=0)
    task = TransformerXLTask(model=model)
    config = TrainConfig(task=task, steps=9, batch=4, schedule=Schedule(peak=1e-9))
    started = TrainingRun.start(config, task.data(text), out=tmp_path / "random")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in started.trainer.model.parameters():
            weight.normal_(std=0.5, generator=generator)
    started.train(should_stop=lambda: True)
    return tmp_path / "random"


def score(checkpoint: Path, text: Path, segments: int | None = None, **options: object) -> float:
    """Bits per byte of the checkpoint's model, with options of its config replaced."""
    trained = load_model(checkpoint)
    model = trained.model
    assert isinstance(model, TransformerXL)
    model.config = replace(model.config, **options)  # type: ignore[arg-type]
    data = ByteLanes(load_corpus(text), CONTEXT)
    return evaluate(trained.task, model, data, lanes=LANES, segments=segments).score


def test_each_memory_length_has_its_bits_per_byte(
    sensitive: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [score(sensitive, text, memory=n) for n in (0, 16, 100)]
    assert len({f"{bits:.3f}" for bits in expected}) == 3
    capsys.readouterr()
    assert run(f"evaluate --lanes {LANES} --memory 0 16 100 --checkpoint", sensitive) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"memory {n}: {bits:.3f} bits/byte"
        for n, bits in zip(("  0", " 16", "100"), expected, strict=True)
    ]
    read = (len(load_corpus(text).validation) - 1) // LANES // CONTEXT * LANES * CONTEXT
    assert lines[3] == f"{read:,} bytes of the held-out part of {text}, segments of {CONTEXT}"


def test_options_replace_those_of_the_training(
    sensitive: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    expected = {
        "": score(sensitive, text),
        "--clamp 3": score(sensitive, text, clamp=3),
        "--same-length": score(sensitive, text, same_length=True),
        "--bytes 80": score(sensitive, text, segments=2),
        f"--data {other}": score(sensitive, other),
    }
    assert len({f"{bits:.3f}" for bits in expected.values()}) == len(expected)
    for words, bits in (*expected.items(), ("--attn-implementation eager", expected[""])):
        capsys.readouterr()
        assert run(f"evaluate --lanes {LANES} {words} --checkpoint", sensitive) == 0
        assert capsys.readouterr().out.startswith(f"memory 16: {bits:.3f} bits/byte\n"), words
    assert run(f"evaluate --lanes {LANES} --context 30 --checkpoint", sensitive) == 0
    assert capsys.readouterr().out.endswith("segments of 30\n")


def test_generator_is_evaluated_without_a_memory(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], error_line: Callable[..., str]
) -> None:
    assert run(f"train generator {TINY} --data {text} --out", tmp_path / "run") == 0
    path = tmp_path / "run"
    assert f"evaluate --checkpoint {path}" in capsys.readouterr().out
    assert run("evaluate --checkpoint", path) == 0
    first, _ = capsys.readouterr().out.splitlines()
    assert first.endswith(" bits/byte")
    assert float(first.split()[0]) < 8
    for option in ("--memory 3", "--clamp 3", "--same-length"):
        line = f"{option.split()[0]} needs a checkpoint of a transformer-xl, got a generator"
        assert error_line(f"evaluate {option} --checkpoint", path) == line


ALL = ("eager", "fused", "sdpa")


def evaluated(
    path: Path, words: str, capsys: pytest.CaptureFixture[str], implementations: Sequence[str] = ALL
) -> list[str]:
    """Lines that `evaluate` prints. Every attention implementation prints the same, and writes the
    same text."""
    printed = set()
    for attention in implementations:
        options = ["--attn-implementation", attention, "--checkpoint", str(path)]
        capsys.readouterr()
        assert run(f"evaluate {words}", *options) == 0
        lines = capsys.readouterr().out
        assert run("generate --prompt boat --length 20 --temperature 0", *options) == 0
        text = capsys.readouterr().out
        assert text.startswith("boat")
        printed.add((lines, text))
    ((lines, _),) = printed
    return lines.splitlines()


@pytest.mark.quick
def test_reformer_is_evaluated_with_other_rounds_and_generates(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--chunk 4 --rounds 2 --hash-every 2 --layers 2 --columns 4"
    assert run(f"train reformer {TINY} {options} --data {text} --out", tmp_path / "run") == 0
    path = tmp_path / "run"
    assert f"evaluate --checkpoint {path}" in capsys.readouterr().out
    data = ByteLanes(load_corpus(text), 50)
    trained = load_model(path)
    expected = []
    for rounds in (1, 8):
        trained.model.config = replace(trained.task.model, rounds=rounds)
        expected.append(evaluate(trained.task, trained.model, data, lanes=2).score)
    assert f"{expected[0]:.3f}" != f"{expected[1]:.3f}"
    assert evaluated(path, "--rounds 1 8 --context 50 --lanes 2", capsys)[:2] == [
        f"rounds {rounds}: {bits:.3f} bits/byte"
        for rounds, bits in zip((1, 8), expected, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "options", "implementations"),
    [
        ("sparse", "--pattern fixed --stride 4 --summaries 1 --subblocks 2 --combination split "
         "--heads 4", ALL),
        ("linear", "--positions learned --columns 4 --hidden 20", ALL[:2]),
        ("linear", "--positions decay --columns 4 --hidden 20", ALL[:2]),
        ("gated-deltanet", "--attention-every 1 --hidden 20", ALL[:2]),
    ],
)  # fmt: skip
def test_segments_may_be_longer_than_the_context(
    tmp_path: Path, text: Path, kind: str, options: str, implementations: Sequence[str],
    capsys: pytest.CaptureFixture[str], error_line: Callable[..., str],
) -> None:  # fmt: skip
    path = tmp_path / "run"
    assert run(f"train {kind} {TINY} {options} --data {text} --out", path) == 0
    assert f"evaluate --checkpoint {path}" in capsys.readouterr().out
    trained = load_model(path)
    assert getattr(trained.task.model, "positions", "") in options
    data = ByteLanes(load_corpus(text), 50)
    expected = evaluate(trained.task, trained.model, data, lanes=2).score
    lines = evaluated(path, "--context 50 --lanes 2", capsys, implementations)
    assert lines[0] == f"{expected:.3f} bits/byte"
    assert lines[1].endswith("segments of 50")
    if implementations != ALL:
        for command in ("evaluate", "generate"):
            line = error_line(f"{command} --attn-implementation sdpa --checkpoint", path)
            assert line == "attn_implementation must be one of 'eager', 'fused', got 'sdpa'"


def test_copies_are_evaluated_by_accuracy(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], error_line: Callable[..., str]
) -> None:
    tiny = "--layers 1 --width 16 --heads 2 --context 12 --vocabulary 12 --chunk 4 --batch 4"
    assert run(f"train reformer-copy {tiny} --steps 3 --threads 1 --out", tmp_path / "run") == 0
    path = tmp_path / "run"
    capsys.readouterr()
    assert run("evaluate --rounds 1 16 --examples 30 --checkpoint", path) == 0
    first, second, data = capsys.readouterr().out.splitlines()
    assert first.startswith("rounds  1: 0.")
    assert second.startswith("rounds 16: 0.")
    assert second.endswith(" accuracy")
    assert data == "150 symbols of held-out copies of random words of 5 symbols"
    for option, kinds in (
        (
            "--lanes 2",
            "generator or a transformer-xl or a sparse or a reformer or a linear or a "
            "gated-deltanet",
        ),
        ("--memory 2", "transformer-xl"),
    ):
        line = f"{option.split()[0]} needs a checkpoint of a {kinds}, got a reformer-copy"
        assert error_line(f"evaluate {option} --checkpoint", path) == line
    linear = "--layers 1 --width 16 --heads 2 --context 12 --vocabulary 12 --batch 4 --steps 3"
    assert run(f"train linear-copy {linear} --threads 1 --out", tmp_path / "linear") == 0
    capsys.readouterr()
    assert run("evaluate --examples 30 --checkpoint", tmp_path / "linear") == 0
    assert capsys.readouterr().out.endswith(f" accuracy\n{data}\n")
    line = error_line("evaluate --examples 0 --checkpoint", path)
    assert "examples must be a whole number of at least 1, got 0" in line
    line = error_line(f"train reformer-copy --data {text} --out", tmp_path / "other")
    assert "draws its data at random and reads none" in line


def test_transformer_xl_generates_the_same_text_with_every_attention_implementation(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt is longer than a segment, and the text longer than the memory."""
    prompt = "row, row, row your boat number 7"
    capsys.readouterr()
    written = set()
    for attention in ("eager", "fused", "sdpa"):
        words = ["--prompt", prompt, "--attn-implementation", attention]
        assert run("generate --length 40 --temperature 0 --checkpoint", checkpoint, *words) == 0
        written.add(capsys.readouterr().out)
    (only,) = written
    assert only.startswith(prompt)
    assert len(only) == len(prompt) + 40 + 1


def test_run_has_its_name_in_files_and_messages(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(f"train transformer-xl {TINY} --steps 2 --memory 8 --data {text}") == 0
    path = Path("runs/transformer-xl")
    assert load_model(path, "transformer-xl").task.model.memory == 8
    out = capsys.readouterr().out
    for command in ("generate", "evaluate"):
        assert f"{command} --checkpoint {path}\n" in out
    assert run("train transformer-xl --threads 1 --resume", path) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--memory 3 -1", "memory must be a whole number of at least 0, got -1"),
        ("--clamp 0", "clamp must be a whole number of at least 1, got 0"),
        ("--same-length --memory 0", "memory must be at least 1 with same_length"),
        ("--lanes 0", "lanes must be a whole number of at least 1, got 0"),
        ("--bytes 0", "bytes must be a whole number of at least 1, got 0"),
        ("--context 0", "context must be a whole number of at least 1, got 0"),
        ("--context 5000", "is too short: a context of 5000 needs 5001 bytes in each part"),
        ("--data nowhere", "nowhere: No such file or directory"),
        ("--device abacus", "device 'abacus' cannot be used"),
    ],
)
def test_invalid_option_is_a_one_line_error(
    checkpoint: Path, error_line: Callable[..., str], words: str, message: str
) -> None:
    assert message in error_line("evaluate --checkpoint", checkpoint, *words.split())
