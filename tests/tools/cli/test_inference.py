"""Tests of the commands that use a model: train on a few lines, then use the checkpoint."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.models import GeneratorConfig, TextGenerator
from transformer_kernels.training import (
    ByteWindows,
    GeneratorTask,
    Schedule,
    TrainConfig,
    corpus_from_bytes,
    read_curve,
    train,
)

ErrorLine = Callable[..., str]
Checkpoint = Callable[[str, str], Path]

TINY = "--layers 1 --width 8 --heads 2 --batch 2 --steps 4 --eval-every 2 --threads 1"


def run(words: str, *others: object) -> int:
    return cli.main([*words.split(), *map(str, others)])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Function that trains a model of a kind with extra options, and returns its checkpoint."""

    def trained(kind: str, options: str) -> Path:
        assert run(f"train {kind} {options} --out", tmp_path / kind) == 0
        return tmp_path / kind

    return trained


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
    result = train(config, ByteWindows(corpus_from_bytes(text, "a line"), 16), out=out)
    assert isinstance(result.model, TextGenerator)
    return out, result.model


@pytest.mark.quick
def test_prompt_is_continued(
    trained: tuple[Path, TextGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = trained
    words = ["--prompt", "né à Pa", "--length", "31", "--temperature", "0"]
    assert cli.main(["generate", "--checkpoint", str(path), *words]) == 0
    assert capsys.readouterr().out == "né à Paris, né à Paris, né à Paris\n"


def test_prompt_may_be_any_bytes(
    trained: tuple[Path, TextGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    """An argument of the command line that is not UTF-8 has surrogates."""
    path, _ = trained
    words = ["--prompt", "a\udcff", "--length", "0"]
    assert cli.main(["generate", "--checkpoint", str(path), *words]) == 0
    assert capsys.readouterr().out == "a\ufffd\n"


def test_seed_and_temperature_are_passed_to_the_model(
    trained: tuple[Path, TextGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = trained
    expected = model.generate(b"P", 40, temperature=5.0, generator=torch.Generator().manual_seed(7))
    for attention in ("eager", "fused", "sdpa"):
        words = "generate --prompt P --length 40 --temperature 5 --seed 7 --attn-implementation"
        assert run(f"{words} {attention} --checkpoint", path) == 0
        assert capsys.readouterr().out == "P" + expected.decode(errors="replace") + "\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--prompt", "", "prompt must have at least one token"),
        ("--length", "-1", "length must be at least 0, got -1"),
        ("--temperature", "-1", "temperature must be at least 0 and finite, got -1.0"),
        ("--seed", "-1", "seed must be at least 0 and below 2**63, got -1"),
    ],
)
def test_generate_option_out_of_range_is_a_one_line_error(
    trained: tuple[Path, TextGenerator], error_line: ErrorLine, option: str, value: str,
    message: str,
) -> None:  # fmt: skip
    assert error_line("generate --checkpoint", trained[0], option, value).startswith(message)


def test_unreadable_checkpoint_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_line: ErrorLine
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not a checkpoint")
    assert error_line("generate --checkpoint", notes).startswith(str(notes))
    monkeypatch.chdir(tmp_path)  # the default is that of `train`
    assert error_line("classify") == f"{Path('runs/classifier')}: No such file or directory"


def test_gpt2_generates_the_same_text_with_every_attention_implementation(
    checkpoint: Checkpoint,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = checkpoint("gpt2", f"{TINY} --vocabulary 300 --context 16 --data {text}")
    assert len(read_curve(tmp_path / "gpt2" / "curve.csv")) == 4
    capsys.readouterr()
    words = ["--prompt", "row your", "--length", "5", "--temperature", "0"]
    written = set()
    for attention in ("eager", "fused", "sdpa"):
        assert run(f"generate --attn-implementation {attention} --checkpoint", path, *words) == 0
        written.add(capsys.readouterr().out)
    (only,) = written
    assert only.startswith("row your")
    assert len(only) > len("row your\n")


@pytest.mark.quick
def test_classify_prints_a_class_for_each_file(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for part in ("train", "test"):
        for name, word in (("pos", "good"), ("neg", "bad")):
            class_folder = tmp_path / "reviews" / part / name
            class_folder.mkdir(parents=True)
            for n in range(9):
                (class_folder / f"{n}.txt").write_text(f"so {word}, " * (n + 1))
    path = checkpoint(
        "classifier",
        f"{TINY} --steps 60 --lr 0.02 --batch 8 --dropout 0 --vocabulary 300 --context 32 "
        f"--data {tmp_path / 'reviews'}",
    )
    files = [tmp_path / "reviews/test/pos/3.txt", tmp_path / "reviews/test/neg/4.txt"]
    capsys.readouterr()
    assert run("classify --checkpoint", path, *files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2] for line in lines] == ["positive", "negative"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"so good, so good")))
    assert run("classify --checkpoint", path) == 0
    assert capsys.readouterr().out.startswith("standard input: positive (")


@pytest.mark.quick
def test_translate_prints_a_translation_for_each_line(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model memorises its whole training data."""
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for part in ("train", "val"):
        (pairs / f"{part}.de").write_text("eins\nzwei\n")
        (pairs / f"{part}.en").write_text("one\ntwo\n")
    path = checkpoint(
        "translator",
        f"{TINY} --width 32 --steps 80 --lr 0.02 --batch 8 --dropout 0 --hidden 32 --context 16 "
        f"--smoothing 0 --data {pairs}",
    )
    capsys.readouterr()
    assert run("translate --checkpoint", path, "zwei", "eins") == 0
    assert capsys.readouterr().out == "two\none\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("eins\nzwei\n"))
    assert run("translate --attn-implementation eager --checkpoint", path) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert run("translate --checkpoint", path, "zwei " * 10) == 2
    assert "at most 16 positions long" in capsys.readouterr().err


@pytest.mark.quick
def test_lookup_answers_a_question(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "facts.tsv"
    table.write_text("the largest ocean\tthe Pacific\nthe red planet\tMars\n")
    path = checkpoint("lookup", f"--steps 40 --batch 8 --eval-every 20 --threads 1 --data {table}")
    capsys.readouterr()
    assert run("lookup --rows 9 --checkpoint", path, "which", "Planet", "is", "red?") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Mars"
    assert [line.split(maxsplit=1)[1] for line in lines[1:]] == ["Mars", "the Pacific"]
    assert run("lookup --rows 0 --checkpoint", path, "planet") == 2
    assert "rows must be a whole number of at least 1" in capsys.readouterr().err


def test_text_that_is_not_utf8_is_a_one_line_error(tmp_path: Path, error_line: ErrorLine) -> None:
    table = tmp_path / "facts.tsv"
    table.write_bytes(b"the red planet\tMars\nthe \xff planet\tPluto\n")
    not_utf8 = f"{table}, line 2, is not UTF-8: invalid start byte"
    assert error_line("train lookup --data", table) == not_utf8
    for command, name in (("lookup", "question"), ("translate", "text")):
        line = error_line(f"{command} --checkpoint x", "\udcff")
        assert line == f"{name} must be UTF-8 text, got '\\udcff'"


def test_standard_input_that_is_not_utf8_is_a_one_line_error(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error_line: ErrorLine,
) -> None:
    """An untrained translator also generates tokens that its tokenizer does not have."""
    for name in ("train.de", "train.en", "val.de", "val.en"):
        (tmp_path / name).write_text("eins\n")
    path = checkpoint("translator", f"{TINY} --hidden 16 --context 16 --data {tmp_path}")
    assert run("translate --checkpoint", path, "eins") == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ein\xffs\n"), "utf-8"))
    line = error_line("translate --checkpoint", path)
    assert line == "standard input must be UTF-8 text: invalid start byte"


@pytest.mark.quick
def test_checkpoint_of_another_kind_is_refused(
    checkpoint: Checkpoint, text: Path, tmp_path: Path, error_line: ErrorLine
) -> None:
    """That of BERT, which no command uses."""
    path = checkpoint("bert", f"{TINY} --vocabulary 300 --context 24 --hidden 16 --data {text}")
    rows = read_curve(path / "curve.csv")
    assert [row.score is not None for row in rows] == [False, True, False, True]
    for command in ("classify", "translate x", "lookup x", "generate", "evaluate"):
        line = error_line(f"{command} --checkpoint", path)
        assert "is a checkpoint of a bert, not of a " in line


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train gpt2 --vocabulary 20", "vocabulary must be at least 256"),
        ("train classifier --data nowhere", "nowhere"),
        ("train translator --data nowhere", "nowhere"),
        ("train translator --smoothing 1", "smoothing must be at least 0 and below 1, got 1.0"),
        ("train lookup --data nowhere", "nowhere: No such file or directory"),
        ("train bert --context 3", "context must be at least"),
        ("train transformer-xl --memory -1", "memory must be a whole number of at least 0, got -1"),
        ("train transformer-xl --batch 200000", "too short: 200000 lanes with a context of 64"),
        ("train linear --columns 0", "columns must be a whole number of at least 1, got 0"),
        (
            "train linear-copy --attn-implementation sdpa",
            "attn_implementation must be one of 'eager', 'fused', got 'sdpa'",
        ),
        ("train gpt2 --batch 2 --accumulate 3", "accumulate must be at most batch, got 3 and 2"),
        ("classify --checkpoint nowhere", "nowhere: No such file or directory"),
    ],
)
def test_invalid_input_is_a_one_line_error(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_line: ErrorLine
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_line(words)
    assert list(tmp_path.iterdir()) == []
