"""Tests of facts and the questions drawn about them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from transformer_kernels.training.data import Fact, as_facts, load_facts
from transformer_kernels.training.data.facts import UNKNOWN, words_of

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have at least one fact, got none"),
        ("a\tb\nno tab\n", "line 2 of .* must have a tab between key and value"),
        ("?!\tb\n", r"every key in .* must have a word, got '\?!'"),
    ],
)
def test_invalid_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "facts.tsv"
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_facts(table)
    with pytest.raises(FileNotFoundError):
        load_facts(tmp_path / "none.tsv")


def test_default_facts_are_the_modules_of_the_standard_library() -> None:
    facts = load_facts()
    values = {fact.value.split(":")[0]: fact for fact in facts.facts}
    assert len(facts.facts) > 80
    assert values.keys() >= {"argparse", "json", "asyncio", "zipfile"}
    assert "command" in words_of(values["argparse"].key)
    assert not any(name.startswith("_") for name in values)
