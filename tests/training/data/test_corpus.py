"""Tests of corpora: loading, the split, and windows of bytes."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from pathlib import Path

import pytest
import torch

from transformer_kernels.training import (
    Corpus,
    corpus_from_bytes,
    draw_batch,
    even_batch,
    load_corpus,
    standard_library_text,
)
from transformer_kernels.training.data import ByteWindows, bytes_of


def test_the_last_tenth_is_held_out() -> None:
    text = bytes(range(256)) * 2
    corpus = corpus_from_bytes(text, "bytes")
    assert len(corpus.validation) == 51
    assert bytes(corpus.train.tolist() + corpus.validation.tolist()) == text
    assert corpus.digest == hashlib.sha256(text).hexdigest()
    assert corpus.source is None


def test_file_is_read_as_raw_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"\x00\xff\r\n<text>\xc3\xa9</text>" * 3
    (tmp_path / "enwik8").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    corpus = load_corpus("enwik8")
    assert bytes(corpus.train.tolist() + corpus.validation.tolist()) == content
    assert (corpus.name, corpus.source) == ("enwik8", str(tmp_path / "enwik8"))


def test_unreadable_file_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        load_corpus(tmp_path / "nothing-here")
    with pytest.raises(IsADirectoryError):
        load_corpus(tmp_path)


def test_default_corpus_is_the_standard_library() -> None:
    corpus = load_corpus()
    assert len(corpus.train) + len(corpus.validation) == 8_000_000
    assert corpus.name == "the Python standard library"
    text = standard_library_text(300_000)
    assert len(text) == 300_000
    assert text == bytes(corpus.train[:300_000].tolist())
    # The text begins with whole modules of the library.
    first = (Path(sysconfig.get_path("stdlib")) / "__future__.py").read_bytes()
    assert text.startswith(first)
    ast.parse(first)


def test_tests_and_installed_packages_are_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.py", "a/z.py", "a/tests/t.py", "site-packages/torch.py", "a.txt", "c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name};")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert standard_library_text() == b"a/z.py;b.py;c.py;"
    assert standard_library_text(9) == b"a/z.py;b."


def test_python_without_sources_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="specify a text file instead"):
        standard_library_text()


def test_targets_are_the_next_bytes() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = draw_batch(text, batch=50, context=7, generator=torch.Generator())
    assert inputs.shape == targets.shape == (50, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert (targets == inputs + 1).all()


def test_every_window_can_be_drawn() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    inputs, targets = draw_batch(text, batch=500, context=7, generator=torch.Generator())
    assert set(inputs[:, 0].tolist()) == {0, 1, 2}
    assert targets.max() == 9


def test_generator_state_determines_the_draw() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    first, _ = draw_batch(text, batch=8, context=7, generator=generator)
    second, _ = draw_batch(text, batch=8, context=7, generator=generator)
    generator.set_state(state)
    again, _ = draw_batch(text, batch=8, context=7, generator=generator)
    assert (first == again).all()
    assert (first != second).any()


def test_even_windows_include_both_ends() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = even_batch(text, batch=4, context=10)
    assert inputs[:, 0].tolist() == [0, 29, 59, 89]
    assert targets[-1, -1] == 99
    assert even_batch(text[:12], batch=50, context=10)[0][:, 0].tolist() == [0, 1]


@pytest.mark.parametrize(("length", "part"), [(120, "training"), (129, "validation")])
def test_text_shorter_than_the_context_is_refused(length: int, part: str) -> None:
    context = {"training": 108, "validation": 12}[part]
    corpus = corpus_from_bytes(bytes(length), "notes.txt")
    with pytest.raises(ValueError, match=f"notes.txt is too short: .*{context}.*the {part} part"):
        corpus.check_length(context)


def test_shortest_valid_text() -> None:
    corpus_from_bytes(bytes(130), "notes.txt").check_length(12)
    with pytest.raises(ValueError, match="the training part has 0"):
        corpus_from_bytes(b"", "empty.txt").check_length(1)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "enwik8").touch()
    with pytest.raises(ValueError, match="enwik8 is empty: expected a text to train on"):
        load_corpus(tmp_path / "enwik8")


def test_bytes_of_inverts_the_tensor_conversion() -> None:
    text = bytes(range(256)) * 2
    corpus = corpus_from_bytes(text, "bytes")
    assert bytes_of(corpus.train) + bytes_of(corpus.validation) == text
    assert bytes_of(torch.empty(0, dtype=torch.uint8)) == b""


def test_byte_windows_match_draw_batch_and_even_batch(corpus: Corpus) -> None:
    """A run that was trained with `draw_batch` continues with the same batches."""
    windows = ByteWindows(corpus, 12)
    ours, theirs = (torch.Generator().manual_seed(5) for _ in range(2))
    for _ in range(3):
        tokens = windows.draw(4, ours)["tokens"]
        inputs, targets = draw_batch(corpus.train, batch=4, context=12, generator=theirs)
        assert torch.equal(tokens[:, :-1], inputs)
        assert torch.equal(tokens[:, 1:], targets)
    assert torch.equal(ours.get_state(), theirs.get_state())
    tokens = windows.held_out(9)["tokens"]
    inputs, targets = even_batch(corpus.validation, batch=9, context=12)
    assert torch.equal(tokens[:, :-1], inputs)
    assert torch.equal(tokens[:, 1:], targets)


def test_draws_are_stable_across_versions() -> None:
    """Recorded window starts of a fixed seed."""
    text = torch.arange(200, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(3)
    inputs, _ = draw_batch(text, batch=6, context=7, generator=generator)
    assert inputs[:, 0].tolist() == [86, 85, 177, 176, 137, 157]


def test_byte_windows_of_a_too_short_text_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="a fox is too short: a context of 180 needs 181 bytes"):
        ByteWindows(corpus, 180)
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        ByteWindows(corpus, 0)
