"""Tests of the tokenizer: lossless, deterministic, and no text encodes to special tokens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers import each
from transformer_kernels.training.data import (
    BEGIN,
    CLASS,
    END,
    MASK,
    PAD,
    SEPARATOR,
    SPECIAL,
    Tokens,
    standard_library_text,
    train_tokens,
)

TEXT = standard_library_text(60_000)
TOKENS = train_tokens(TEXT, 600, special=True)
PLAIN = train_tokens(TEXT, 400)


@pytest.mark.quick
@pytest.mark.parametrize("tokens", [TOKENS, PLAIN, Tokens(), Tokens(special=True)])
def test_round_trip_of_arbitrary_bytes(tokens: Tokens) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.binary(max_size=200) | st.text(max_size=80))
    def check(text: bytes | str) -> None:
        encoded = tokens.encode(text)
        assert encoded.dtype == torch.int64
        assert tokens.decode(encoded) == (text.encode() if isinstance(text, str) else text)
        assert ((encoded >= tokens.first) & (encoded < tokens.vocabulary)).all()

    check()


def test_long_text_is_compressed_without_loss() -> None:
    encoded = PLAIN.encode(TEXT)
    assert PLAIN.decode(encoded) == TEXT
    assert len(encoded) < 0.55 * len(TEXT)
    assert len(torch.unique(encoded)) > 200


def test_most_frequent_pairs_are_merged_first() -> None:
    tokens = train_tokens(b"hug hug hug pug pug hug", 259)
    assert [tokens.decode([number]) for number in range(256, 259)] == [b"ug", b"hug", b" hug"]
    assert [tokens.decode([token]) for token in tokens.encode("hug pug")] == [
        b"hug",
        *(b" ", b"p", b"ug"),
    ]


def test_tokens_do_not_cross_word_boundaries() -> None:
    tokens = train_tokens(b"ab c12\n\t--ab c12\n\t--" * 50, 300)
    pieces = {tokens.decode([number]) for number in range(256, tokens.vocabulary)}
    assert pieces == {b"ab", b" c", b"12", b"\n\t", b"--"}


def test_encode_all_equals_encode() -> None:
    texts = TEXT.splitlines(keepends=True)[:700]
    for row, text in zip(TOKENS.encode_all(texts), texts, strict=True):
        assert torch.equal(row, TOKENS.encode(text))


def test_special_tokens_come_first() -> None:
    assert SPECIAL == ("pad", "begin", "end", "class", "separator", "mask")
    assert tuple(range(6)) == (PAD, BEGIN, END, CLASS, SEPARATOR, MASK)
    assert (TOKENS.first, PLAIN.first) == (6, 0)
    assert (TOKENS.vocabulary, PLAIN.vocabulary) == (600, 400)
    assert Tokens(special=True).encode("a").tolist() == [6 + ord("a")]
    assert TOKENS.decode([BEGIN, *TOKENS.encode("a b"), END, PAD]) == b"a b"


@pytest.mark.parametrize("text", ["<pad>", "[MASK]", "pad begin", "\x00\x01\x05"])
def test_no_text_encodes_to_a_special_token(text: str) -> None:
    assert TOKENS.encode(text).min() >= 6


def test_training_gives_the_same_tokens_in_another_process() -> None:
    code = (
        "from transformer_kernels.training.data import *\n"
        "print(train_tokens(standard_library_text(60_000), 600, special=True).to_json())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == TOKENS.to_json()


def test_text_with_few_pairs_gives_fewer_tokens() -> None:
    tokens = train_tokens("abab", 1000)
    assert tokens.vocabulary == 256 + len(tokens.merges) < 260
    assert train_tokens(b"", 300).vocabulary == 256
    assert train_tokens(b"", 300).encode("x").tolist() == [ord("x")]


@pytest.mark.parametrize("tokens", [TOKENS, PLAIN, Tokens(), Tokens(special=True)])
def test_json_round_trip(tokens: Tokens) -> None:
    again = Tokens.from_json(tokens.to_json())
    assert again == tokens
    assert again.vocabulary == tokens.vocabulary
    assert torch.equal(again.encode(TEXT[:5000]), tokens.encode(TEXT[:5000]))


@each(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"merges": []}',
        '{"special": true}',
        '{"merges": [[97]], "special": true}',
        '{"merges": [["a", "b"]], "special": true}',
        '{"merges": [[97, 256]], "special": false}',
        '{"merges": [[-1, 5]], "special": false}',
        '{"merges": 5, "special": false}',
    ],
)
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"text must be a result of Tokens\.to_json, got "):
        Tokens.from_json(text)


def test_two_merges_with_the_same_bytes_are_one_token() -> None:
    """Merges a + bc and ab + c."""
    merges = [[98, 99], [97, 256], [97, 98], [258, 99]]
    tokens = Tokens.from_json(json.dumps({"special": False, "merges": merges}))
    assert tokens.vocabulary == 259
    assert tokens.decode([257]) == b"abc"
    assert tokens.decode(tokens.encode("abc")) == b"abc"


@pytest.mark.parametrize("token", [-1, 600])
def test_token_outside_of_the_vocabulary_is_named(token: int) -> None:
    with pytest.raises(ValueError, match=f"at least 0 and below 600, got {token}"):
        TOKENS.decode([7, token])


@pytest.mark.parametrize(
    ("vocabulary", "special", "message"),
    [
        (255, False, r"at least 256 \(256 bytes and 0 special tokens\), got 255"),
        (261, True, r"at least 262 \(256 bytes and 6 special tokens\), got 261"),
        (0, True, "vocabulary must be a whole number of at least 1, got 0"),
    ],
)
def test_too_small_vocabulary_is_refused(vocabulary: int, special: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokens(TEXT, vocabulary, special=special)


def test_missing_tokenizers_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    refused = r"tokenizers is not installed: pip install transformer_kernels\[train\]"
    with pytest.raises(ImportError, match=refused):
        train_tokens(TEXT, 300)
    loaded = Tokens.from_json(TOKENS.to_json())
    with pytest.raises(ImportError, match=refused):
        loaded.encode("text")
    assert loaded.decode([6 + ord("a")]) == b"a"
    assert Tokens().encode("a").tolist() == [ord("a")]


def test_missing_special_tokens_error_says_how_to_get_them() -> None:
    with pytest.raises(ValueError, match=r"must have special tokens, got none: use train_tokens"):
        PLAIN.check_special()
    TOKENS.check_special()
