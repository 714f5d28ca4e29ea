"""Tests of text pairs read from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from transformer_kernels.training.data import (
    BEGIN,
    END,
    Pairs,
    Tokens,
    load_pairs,
    pair_texts,
    read_pairs,
    train_tokens,
)

GERMAN = [f"Zwei Stra\u00dfen und {number} H\u00e4user." for number in range(40)]
ENGLISH = [f"Two streets and {number} houses." for number in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, lines in (("de", GERMAN), ("en", ENGLISH)):
        (tmp_path / f"train.{name}").write_text("\n".join(lines[:30]) + "\n", encoding="utf-8")
        (tmp_path / f"val.{name}").write_text("\n".join(lines[30:]), encoding="utf-8")
    return tmp_path


def read(pairs: Pairs, batch: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    texts: list[tuple[str, str]] = []
    for source, source_length, target, target_length in zip(
        *(batch[name] for name in ("source", "source_lengths", "target", "target_lengths")),
        strict=True,
    ):
        assert target[0] == BEGIN
        assert target[target_length - 1] == END
        assert (source[:source_length] >= 6).all()
        assert (target[1 : target_length - 1] >= 6).all()
        texts.append((pairs.tokens.decode(source).decode(), pairs.tokens.decode(target).decode()))
    return texts


def test_lines_are_paired_by_number(folder: Path) -> None:
    pairs = load_pairs(folder, vocabulary=300)
    drawn = read(pairs, pairs.draw(300, torch.Generator()))
    assert set(drawn) == set(zip(GERMAN[:30], ENGLISH[:30], strict=True))
    held_out = read(pairs, pairs.held_out(99))
    assert held_out == list(zip(GERMAN[30:], ENGLISH[30:], strict=True))
    assert pairs.skipped == 0


def test_languages_can_be_swapped(folder: Path) -> None:
    pairs = load_pairs(folder, languages=("en", "de"), vocabulary=300)
    assert read(pairs, pairs.held_out(1)) == [(ENGLISH[30], GERMAN[30])]


def test_both_languages_share_byte_pairs_of_the_training_files(folder: Path) -> None:
    pairs = load_pairs(folder, vocabulary=300)
    lines = [line for pair in zip(GERMAN[:30], ENGLISH[:30], strict=True) for line in pair]
    assert pairs.tokens == train_tokens("\n".join(lines), 300, special=True)
    assert load_pairs(folder, tokens=Tokens(special=True)).tokens == Tokens(special=True)


def test_empty_and_too_long_pairs_are_skipped(folder: Path) -> None:
    (folder / "val.de").write_text("a\n\n \u00a0\nb\nc\n" + "d" * 7 + "\n" + "e" * 8 + "\ng\ng\n")
    (folder / "val.en").write_text("A\nB\nC\n\n\tD \r\nE\nF\n" + "G" * 6 + "\n" + "H" * 7)
    pairs = load_pairs(folder, tokens=Tokens(special=True), longest=100)
    assert len(read(pairs, pairs.held_out(99))) == 6
    assert pairs.skipped == 3
    pairs = read_pairs(
        train=(folder / "val.de", folder / "val.en"),
        validation=(folder / "val.de", folder / "val.en"),
        tokens=Tokens(special=True),
        longest=8,
    )
    kept = [("a", "A"), ("c", "D"), ("d" * 7, "E"), ("e" * 8, "F"), ("g", "G" * 6)]
    assert read(pairs, pairs.held_out(99)) == kept
    assert pairs.skipped == 2 * 4


def test_byte_order_mark_is_removed(folder: Path) -> None:
    (folder / "val.de").write_bytes(b"\xef\xbb\xbf" + (folder / "val.de").read_bytes())
    pairs = load_pairs(folder, vocabulary=300)
    assert read(pairs, pairs.held_out(1)) == [(GERMAN[30], ENGLISH[30])]


def test_only_line_feeds_end_lines(folder: Path) -> None:
    (folder / "val.de").write_text("a\u2028b\x0cc\nd", encoding="utf-8")
    (folder / "val.en").write_text("A\nB")
    pairs = load_pairs(folder, vocabulary=300)
    assert read(pairs, pairs.held_out(9)) == [("a\u2028b\x0cc", "A"), ("d", "B")]


@pytest.mark.parametrize("name", ["train.de", "train.en", "val.de", "val.en"])
def test_missing_file_is_an_oserror(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_pairs(folder)


def test_different_numbers_of_lines_are_refused(folder: Path) -> None:
    with (folder / "train.en").open("a") as file:
        file.write("one more\n")
    refused = r"the same number of lines, got 30 in .*train\.de and 31 in .*train\.en"
    with pytest.raises(ValueError, match=refused):
        load_pairs(folder)


def test_invalid_utf8_error_names_the_line(folder: Path) -> None:
    (folder / "val.en").write_bytes(b"ok\nStra\xdfe\n")
    with pytest.raises(ValueError, match=r"val\.en, line 2, is not UTF-8: invalid "):
        load_pairs(folder)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_files_without_pairs_are_refused(folder: Path, content: str) -> None:
    for name in ("val.de", "val.en"):
        (folder / name).write_text(content)
    refused = (
        f"none of the {len(content)} pairs in the validation part has text on both sides and at"
    )
    with pytest.raises(ValueError, match=refused):
        load_pairs(folder, vocabulary=300)


def test_too_small_maximum_length_is_refused() -> None:
    pairs = [("a", "b")]
    with pytest.raises(
        ValueError, match=r"x: none of the 1 pairs in the training part .* 2 tokens"
    ):
        pair_texts(pairs, pairs, tokens=Tokens(special=True), longest=2, name="x")
    with pytest.raises(ValueError, match="longest must be a whole number of at least 1, got 0"):
        pair_texts(pairs, pairs, tokens=Tokens(special=True), longest=0, name="x")


def test_tokenizer_without_special_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="tokens must have special tokens"):
        load_pairs(folder, tokens=Tokens())
