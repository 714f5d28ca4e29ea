"""Tests of text pairs: from files, and numbers and dates in words."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch

from tests.support.tiers import each
from transformer_kernels.training.data import (
    BEGIN,
    END,
    Pairs,
    Tokens,
    load_pairs,
    pair_texts,
    spoken_pairs,
    train_tokens,
)
from transformer_kernels.training.data.pairs import date_to_words, is_held_out, number_to_words

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
    for language in ("de", "en"):
        (folder / f"train.{language}").write_bytes((folder / f"val.{language}").read_bytes())
    pairs = load_pairs(folder, tokens=Tokens(special=True), longest=8)
    kept = [("a", "A"), ("c", "D"), ("d" * 7, "E"), ("e" * 8, "F"), ("g", "G" * 6)]
    assert read(pairs, pairs.held_out(99)) == kept
    assert pairs.skipped == 2 * 4


def test_byte_order_mark_is_removed_and_only_line_feeds_end_lines(folder: Path) -> None:
    (folder / "val.de").write_text("\ufeffa\u2028b\x0cc\nd", encoding="utf-8")
    (folder / "val.en").write_text("A\nB")
    pairs = load_pairs(folder, vocabulary=300)
    assert read(pairs, pairs.held_out(9)) == [("a\u2028b\x0cc", "A"), ("d", "B")]


def test_missing_file_is_an_oserror(folder: Path) -> None:
    for name in ("val.en", "val.de", "train.en", "train.de"):
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


def test_files_without_pairs_are_refused(folder: Path) -> None:
    for content in ("", "\n\n"):
        for name in ("val.de", "val.en"):
            (folder / name).write_text(content)
        refused = f"of the {len(content)} pairs in the validation part has text on both sides and"
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


@each(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (40, "forty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (118, "one hundred and eighteen"),
        (1000, "one thousand"),
        (1204, "one thousand two hundred and four"),
        (1_004, "one thousand and four"),
        (10_200, "ten thousand two hundred"),
        (205_017, "two hundred and five thousand and seventeen"),
        (1_000_000, "one million"),
        (2_000_300_001, "two billion three hundred thousand and one"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert number_to_words(number) == words


@each(
    ("date", "words"),
    [
        ("2024-02-29", "the twenty-ninth of February, twenty twenty-four"),
        ("2000-01-01", "the first of January, two thousand"),
        ("2005-05-02", "the second of May, two thousand and five"),
        ("2010-08-03", "the third of August, twenty ten"),
        ("1900-12-12", "the twelfth of December, nineteen hundred"),
        ("1905-06-20", "the twentieth of June, nineteen oh five"),
        ("1984-07-31", "the thirty-first of July, nineteen eighty-four"),
        ("2099-09-08", "the eighth of September, twenty ninety-nine"),
        ("2100-03-05", "the fifth of March, twenty-one hundred"),
        ("1000-04-10", "the tenth of April, one thousand"),
        ("3009-11-11", "the eleventh of November, three thousand and nine"),
        ("1066-10-14", "the fourteenth of October, ten sixty-six"),
    ],
)
def test_dates_in_words(date: str, words: str) -> None:
    assert date_to_words(datetime.date.fromisoformat(date)) == words


@pytest.fixture(scope="module")
def spoken() -> Pairs:
    return spoken_pairs(1500, 1000)


def texts_of(pairs: Pairs, part: str) -> list[tuple[str, str]]:
    sources, targets = getattr(pairs, part)
    return [
        (pairs.tokens.decode(sources[row]).decode(), pairs.tokens.decode(targets[row]).decode())
        for row in range(len(sources))
    ]


def figures(pair: tuple[str, str]) -> str:
    """Checks a pair, and returns its number or date in figures."""
    source, target = pair
    asked, question = source.split(": ", 1)
    given, words = (question, target) if asked == "words" else (target, question)
    assert asked in ("words", "figures")
    if "-" in given:
        date = datetime.date.fromisoformat(given)
        assert date_to_words(date) == words
        assert 1900 <= date.year <= 2099
    else:
        number = int(given.replace(",", ""))
        assert given == f"{number:,}"
        assert number_to_words(number) == words
        assert number < 10**6
    return given


def test_every_pair_is_correct_and_present_in_both_directions(spoken: Pairs) -> None:
    for part in ("train", "validation"):
        asked = [figures(pair) for pair in texts_of(spoken, part)]
        assert len(asked) == 2 * len(set(asked))


def test_no_number_or_date_is_in_training_and_validation(spoken: Pairs) -> None:
    trained, held_out = (
        {figures(pair) for pair in texts_of(spoken, part)} for part in ("train", "validation")
    )
    assert not trained & held_out
    for given in held_out:
        assert is_held_out(given)
    assert trained >= {str(number) for number in range(100)}
    count = len(trained) + len(held_out) - 100
    assert abs(len(held_out) - 0.1 * count) < 4 * (0.09 * count) ** 0.5


def test_numbers_have_one_to_six_digits(spoken: Pairs) -> None:
    numbers = {figures(pair) for pair in texts_of(spoken, "train")}
    digits = [len(given.replace(",", "")) for given in numbers if "-" not in given]
    assert [digits.count(length) for length in (1, 2)] == [10, 90]
    assert all(digits.count(length) > 150 for length in (3, 4, 5, 6))
    assert len(numbers) - len(digits) > 850


def test_tokens_are_bytes_and_no_pair_is_skipped(spoken: Pairs) -> None:
    found = (spoken.tokens, spoken.skipped, spoken.source)
    assert found == (Tokens(special=True), 0, None)
    batch = spoken.draw(64, torch.Generator())
    assert max(batch["source"].shape[1], batch["target"].shape[1]) <= 96


def test_held_out_pairs_do_not_depend_on_the_counts() -> None:
    few, many = spoken_pairs(300, 50), spoken_pairs(2000, 2000)
    assert not set(texts_of(few, "train")) & set(texts_of(many, "validation"))
    assert not set(texts_of(few, "validation")) & set(texts_of(many, "train"))


@each("name", ["numbers", "dates"])
def test_count_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
        spoken_pairs(**{name: 0})


def test_missing_num2words_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"num2words is not installed: pip install"):
        number_to_words(10**9 + 7)
