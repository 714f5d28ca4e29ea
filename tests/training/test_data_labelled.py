"""Labelled texts, questions about facts, and copies of random words."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.tiers import each
from transformer_kernels.training.data import (
    Associations,
    Copies,
    Fact,
    LabelledTexts,
    Tokens,
    as_facts,
    label_texts,
    load_facts,
    load_reviews,
    load_snippets,
    review_text,
    train_tokens,
)
from transformer_kernels.training.data.labelled import SNIPPET_CLASSES, cut_source
from transformer_kernels.training.data.recall import UNKNOWN, words_of
from transformer_kernels.training.data.text import python_files

CLASS_FOLDERS = ("train/neg", "train/pos", "test/neg", "test/pos")


@pytest.fixture
def letters() -> LabelledTexts:
    """Training texts are lower case, held-out texts upper case; class a is by far the largest."""
    return label_texts(
        [[b"a" * (i % 7 + 1) for i in range(300)], [b"b"], [b"cc", b"c"]],
        [[b"A" * (i + 1) for i in range(9)], [b"B"] * 3, [b"C"] * 9],
        classes=("a", "b", "c"), tokens=Tokens(), longest=5, name="letters",
    )  # fmt: skip


def test_texts_match_their_labels(letters: LabelledTexts) -> None:
    for batch, names in (
        (letters.draw(200, torch.Generator()), "abc"),
        (letters.held_out(21), "ABC"),
    ):
        for row, length, label in zip(
            batch["tokens"], batch["lengths"].tolist(), batch["labels"].tolist(), strict=True
        ):
            assert letters.tokens.decode(row[:length]) == names[label].encode() * length


def test_classes_are_drawn_with_equal_probability_and_their_texts_cut(
    letters: LabelledTexts,
) -> None:
    batch = letters.draw(3000, torch.Generator().manual_seed(0))
    deviation = (3000 * 1 / 3 * 2 / 3) ** 0.5
    assert (batch["labels"].bincount() - 1000).abs().max() < 4 * deviation
    for label, lengths in ((0, {1, 2, 3, 4, 5}), (1, {1}), (2, {1, 2})):
        assert set(batch["lengths"][batch["labels"] == label].tolist()) == lengths


def test_held_out_examples_cycle_through_the_classes(letters: LabelledTexts) -> None:
    for count, labels in (
        (7, [0, 1, 2, 0, 1, 2, 0]),
        (2, [0, 1]),
        (15, [0, 1, 2] * 3 + [0, 2] * 2),
        (99, [0, 1, 2] * 3 + [0, 2] * 6),
    ):
        assert letters.held_out(count)["labels"].tolist() == labels
    batch = letters.held_out(9)
    assert batch["lengths"][batch["labels"] == 0].tolist() == [1, 5, 5]  # evenly spaced, and cut


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for class_folder in CLASS_FOLDERS:
        (tmp_path / class_folder).mkdir(parents=True)
        for number in range(5):
            text = f"{class_folder} {number}: caf\u00e9<br />" + "!" * number
            (tmp_path / class_folder / f"{number}_7.txt").write_text(text, encoding="utf-8")
    (tmp_path / "train/unsup").mkdir()
    (tmp_path / "train/pos/notes.md").write_text("no review")
    return tmp_path


def test_train_folder_is_drawn_and_test_folder_is_held_out(folder: Path) -> None:
    reviews = load_reviews(folder, 64)
    assert reviews.classes == ("negative", "positive")
    drawn = reviews.draw(60, torch.Generator())
    for batch, part in ((drawn, "train"), (reviews.held_out(10), "test")):
        seen = set()
        columns = (batch[name] for name in ("tokens", "lengths", "labels"))
        for row, length, label in zip(*columns, strict=True):
            text = reviews.tokens.decode(row[:length]).decode()
            assert text.startswith(f"{part}/{('neg', 'pos')[label]} ")
            assert "caf\u00e9<br />" in text
            seen.add(text)
        assert len(seen) == 10
    assert len(reviews.held_out(99)["labels"]) == 10


def test_reviews_with_a_byte_pair_tokenizer(folder: Path) -> None:
    text = review_text(folder)
    assert text.count(b"\n") == 10
    assert b"test/" not in text
    tokens = train_tokens(text, 280)
    batch = load_reviews(folder, 8, tokens=tokens).held_out(4)
    assert batch["tokens"].shape == (4, 8)
    assert tokens.decode(batch["tokens"][0]).startswith(b"test/neg 0")


def test_invalid_utf8_is_accepted(folder: Path) -> None:
    (folder / "train/neg/9_1.txt").write_bytes(b"\xff\xfe\x00")
    assert load_reviews(folder).train[0][5].tolist() == [255, 254, 0]


def test_missing_folder_error_describes_the_layout(folder: Path) -> None:
    for class_folder in CLASS_FOLDERS:
        (folder / class_folder).rename(folder / "elsewhere")
        refused = re.escape(
            f"the folder {folder / class_folder} does not exist: {folder} must contain reviews, "
            "one per file, in train/neg/*.txt, train/pos/*.txt, test/neg/*.txt and test/pos/*.txt"
        )
        with pytest.raises(FileNotFoundError, match=refused):
            load_reviews(folder)
        (folder / "elsewhere").rename(folder / class_folder)


def test_empty_reviews_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        load_reviews(folder, 0, tokens=Tokens())
    (folder / "test/pos/3_7.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"3_7\.txt is empty: every file must be a review"):
        load_reviews(folder)
    shutil.rmtree(folder / "test/pos")
    (folder / "test/pos").mkdir()
    refused = r"the folder .*test/pos has no \*\.txt files: .* must contain reviews"
    with pytest.raises(ValueError, match=refused):
        load_reviews(folder)


@pytest.fixture(scope="module")
def snippets() -> LabelledTexts:
    return load_snippets(256)


@pytest.fixture(scope="module")
def texts(snippets: LabelledTexts) -> dict[str, list[list[bytes]]]:
    """Training and held-out snippets of each class."""
    decode = snippets.tokens.decode
    return {
        name: [[decode(rows[n]) for n in range(len(rows))] for rows in parts]
        for name, *parts in zip(SNIPPET_CLASSES, snippets.train, snippets.validation, strict=True)
    }


def test_every_class_has_enough_text_of_different_lengths(snippets: LabelledTexts) -> None:
    assert snippets.classes == tuple(SNIPPET_CLASSES)
    assert len(snippets.classes) == 10
    for train, validation in zip(snippets.train, snippets.validation, strict=True):
        assert len(train.values) > 150_000
        assert len(validation.values) > 20_000
    lengths = snippets.draw(300, torch.Generator().manual_seed(0))["lengths"]
    assert 64 <= lengths.min() < 90
    assert 220 < lengths.max() <= 256


def test_no_snippet_and_no_file_is_in_training_and_validation(
    texts: dict[str, list[list[bytes]]],
) -> None:
    """Long lines that occur in a single file occur in snippets of one part only."""
    folder = Path(sysconfig.get_path("stdlib"))
    for name, modules in SNIPPET_CLASSES.items():
        assert not set(texts[name][0]) & set(texts[name][1])
        parts = [{line for text in part for line in text.splitlines()} for part in texts[name]]
        paths: list[Path] = []
        for path in (folder / f"{module}.py" for module in modules):
            paths += [path] if path.is_file() else python_files(path.with_suffix(""))
        files = [{x for x in path.read_bytes().splitlines() if len(x) > 50} for path in paths]
        count = Counter(line for file in files for line in file)
        for file in files:
            own = {line for line in file if count[line] == 1}
            assert not (own & parts[0] and own & parts[1]), name


def test_imports_and_module_names_are_removed(texts: dict[str, list[list[bytes]]]) -> None:
    for name, modules in SNIPPET_CLASSES.items():
        named = re.compile(rb"\b(" + b"|".join(m.encode() for m in modules) + rb")\b", re.I)
        for text in (text for part in texts[name] for text in part):
            assert not named.search(text)
            assert not re.search(rb"^\s*(import|from)\b", text, re.M)


def test_source_is_cut_at_line_ends() -> None:
    source = (
        b"#! /usr/bin/env python\n# Copyright by somebody\n\n"
        b'"""Post."""\n\nimport os\nfrom . import parser\n'
        b"EMAIL = 1  # Email\nemailed = 2\n" + b"x" * 200 + b"\n"
    ) + b"".join(b"    line_%d = None\n" % i for i in range(60))
    pieces = list(cut_source(source, ("email",), 100))
    lines = [line for piece in pieces for line in piece.split(b"\n") if line]
    assert lines[:2] == [b'"""Post."""', b"emailed = 2"]
    assert set(lines) <= set(source.split(b"\n"))
    assert len(lines) > 55
    assert all(25 <= len(piece) <= 100 for piece in pieces)
    assert len({len(piece) for piece in pieces}) > 5


def test_snippets_with_a_byte_pair_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"tomllib": ("tomllib",), "json": ("json",)}
    monkeypatch.setattr("transformer_kernels.training.data.labelled.SNIPPET_CLASSES", classes)
    tokens = train_tokens(b"self.assertEqual(result, None)\n" * 9, 300)
    dataset = load_snippets(64, tokens=tokens)
    assert dataset.classes == ("tomllib", "json")
    assert dataset.tokens == tokens
    assert dataset.draw(50, torch.Generator())["tokens"].max() >= 256


def test_too_short_context_and_python_without_sources_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="context must be at least 64 for lines of source, got 63"):
        load_snippets(63)
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        load_snippets(0)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    refused = r"the class archives needs at least two source files in .*, got 0"
    with pytest.raises(FileNotFoundError, match=refused):
        load_snippets()


FACTS = as_facts([Fact("the red fox runs far", "x"), Fact("a bird", "y")], "two facts")


def test_compound_names_are_split_into_words() -> None:
    assert words_of("parseArgs of OptionParser, utf_8!") == [
        *("parse", "args", "of", "option", "parser", "utf", "8")
    ]


def test_question_has_half_of_the_words_of_its_key() -> None:
    batch = FACTS.draw(50, torch.Generator().manual_seed(0))
    seen = set()
    for words, length, row in zip(*(batch[name] for name in batch), strict=True):
        asked = words[:length].tolist()
        assert set(asked) <= set(FACTS.words(FACTS.facts[int(row)].key).tolist())
        assert len(set(asked)) == len(asked) == (3 if row == 0 else 2)
        seen.add(tuple(asked))
    assert len(seen) > 15


def test_held_out_questions_are_the_same_at_every_call() -> None:
    first, again = (FACTS.held_out(20) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_unknown_words_share_one_token() -> None:
    assert FACTS.words("Bird spaceship").tolist() == [FACTS.vocabulary.index("bird"), UNKNOWN]
    assert FACTS.words("!?").tolist() == [UNKNOWN]


def test_table_is_read(tmp_path: Path) -> None:
    table = tmp_path / "facts.tsv"
    table.write_text("largest ocean\tthe Pacific\thas islands\nred planet\tMars\n", "utf-8")
    facts = load_facts(table)
    assert facts.facts[0] == Fact("largest ocean", "the Pacific\thas islands")
    assert (facts.name, facts.source) == (str(table), str(table.resolve()))
    assert facts.digest != FACTS.digest


def test_invalid_table_is_named(tmp_path: Path) -> None:
    table = tmp_path / "facts.tsv"
    with pytest.raises(FileNotFoundError):
        load_facts(table)
    for text, message in (
        ("", "must have at least one fact, got none"),
        ("a\tb\nno tab\n", "line 2 of .* must have a tab between key and value"),
        ("?!\tb\n", r"every key in .* must have a word, got '\?!'"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_facts(table)


def test_default_facts_are_the_modules_of_the_standard_library() -> None:
    facts = load_facts()
    values = {fact.value.split(":")[0]: fact for fact in facts.facts}
    assert len(facts.facts) > 80
    assert values.keys() >= {"argparse", "json", "asyncio", "zipfile"}
    assert "command" in words_of(values["argparse"].key)
    assert not any(name.startswith("_") for name in values)


DATA = Copies(context=10, vocabulary=12)


def test_a_text_is_a_word_twice_with_a_separator_before_each() -> None:
    tokens = DATA.draw(200, torch.Generator().manual_seed(0))["tokens"]
    assert tokens.shape == (200, 10)
    assert tokens.dtype == torch.int64
    first, second = tokens.split(5, dim=1)
    assert torch.equal(first, second)
    assert (first[:, 0] == 0).all()
    assert set(first[:, 1:].unique().tolist()) == set(range(1, 12))


def test_held_out_words_are_never_drawn() -> None:
    small = Copies(context=6, vocabulary=12)  # 121 words of two symbols
    held_out = small.held_out(500)["tokens"]
    assert len(held_out) == 500
    drawn = small.draw(5000, torch.Generator().manual_seed(0))["tokens"]
    words = [{tuple(row) for row in tokens.tolist()} for tokens in (held_out, drawn)]
    assert not words[0] & words[1]
    assert len(words[0] | words[1]) == 121


def test_name_and_digest_tell_the_sizes() -> None:
    assert DATA.name == "copies of random words of 4 symbols"
    assert DATA.source is None
    digests = {Copies(c, v).digest for c, v in ((10, 12), (12, 12), (10, 13))}
    assert len(digests) == 3
    assert DATA.digest in digests


@each(
    ("context", "vocabulary", "message"),
    [
        (9, 12, "context must be even and at least 4, got 9"),
        (2, 12, "context must be even and at least 4, got 2"),
        (0, 12, "context must be a whole number of at least 1, got 0"),
        (10, 10, "vocabulary must be at least 11, got 10"),
    ],
)
def test_invalid_sizes_raise_value_error(context: int, vocabulary: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Copies(context, vocabulary)


def test_a_text_is_keys_with_their_values_and_again_in_another_order() -> None:
    """13 tokens: 6 keys and 7 values. In training, texts have 1 to 4 distinct keys."""
    data = Associations(context=16, vocabulary=13)
    assert data.name == "random texts of 4 keys and values"
    drawn = data.draw(200, torch.Generator().manual_seed(0))["tokens"]
    for tokens, numbers in ((data.held_out(200)["tokens"], {4}), (drawn, {1, 2, 3, 4})):
        assert tokens.shape == (200, 16)
        halves = tokens.view(200, 2, 4, 2).tolist()
        distinct = []
        for told, asked in halves:
            assert sorted(told) == sorted(asked)
            value_of = dict(told)
            assert all(value_of[key] == value for key, value in told)
            distinct.append(len(value_of))
        assert set(distinct) == numbers
        assert all(distinct.count(number) > 30 for number in numbers)
        keys, values = tokens[:, ::2], tokens[:, 1::2]
        assert set(keys.unique().tolist()) == set(range(6))
        assert set(values.unique().tolist()) == set(range(6, 13))
        moved = [told != asked for told, asked in halves]
        assert sum(moved) > 100


@each(
    ("context", "vocabulary", "message"),
    [
        (14, 12, "context must be a multiple of 4, got 14"),
        (28, 13, "vocabulary must be at least 14, twice the number of keys in a text, got 13"),
        (16, 10, "vocabulary must be at least 11, got 10"),
    ],
)
def test_invalid_sizes_of_associations_raise_value_error(
    context: int, vocabulary: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Associations(context, vocabulary)
