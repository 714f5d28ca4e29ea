"""What every dataset promises, padded rows, and the tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    Associations,
    ByteWindows,
    Copies,
    Dataset,
    MaskedSentences,
    Tokens,
    TokenWindows,
    corpus_from_bytes,
    label_texts,
    load_pairs,
    load_reviews,
    pair_texts,
    standard_library_text,
    train_tokens,
)
from transformer_kernels.training.data.dataset import RaggedTokens, digest_of, evenly_spaced

CORPUS = corpus_from_bytes(b"".join(b"line %d of the text\n" % i for i in range(400)), "lines")
BYTES = Tokens(special=True)
PAIRS = [(f"in {i}", f"out {i * i}") for i in range(300)]

Make = Callable[[int], Dataset]

MAKERS: dict[str, Make] = {
    "bytes": lambda size: ByteWindows(CORPUS, size),
    "tokens": lambda size: TokenWindows(CORPUS, BYTES, size),
    "masked": lambda size: MaskedSentences(CORPUS, BYTES, size),
    "labelled": lambda size: label_texts(
        [[b"a" * (i % 50 + 1) for i in range(60)], [b"b" * (i + 1) for i in range(9)]],
        [[b"A" * (i + 1) for i in range(40)], [b"B" * (i % 30 + 1) for i in range(50)]],
        classes=("a", "b"),
        tokens=Tokens(),
        longest=size,
        name="letters",
    ),
    "pairs": lambda size: pair_texts(
        PAIRS[:200], PAIRS[200:], tokens=BYTES, longest=size, name="squares"
    ),
    "copies": lambda size: Copies(2 * size, 12),
    "associations": lambda size: Associations(4 * size, 2 * size),
}
RANDOM = ("copies", "associations")
"""Their texts are drawn at random, as many as there are calls for."""


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


def test_batches_are_int64_and_zero_padded_without_the_global_generator(make: Make) -> None:
    state = torch.get_rng_state()
    dataset = make(20)
    for batch in (dataset.draw(7, torch.Generator()), dataset.held_out(7)):
        for name, x in batch.items():
            assert (x.dtype, x.device.type, len(x)) == (torch.int64, "cpu", 7), name
        for name, lengths in batch.items():
            if not name.endswith("lengths"):
                continue
            rows = batch["tokens" if name == "lengths" else name.removesuffix("_lengths")]
            assert rows.shape[1] == lengths.max() <= 20
            assert lengths.min() >= 1
            padding = torch.arange(rows.shape[1]) >= lengths[:, None]
            assert (rows[padding] == 0).all()
    assert torch.equal(torch.get_rng_state(), state)


def test_generator_state_determines_the_draw(make: Make) -> None:
    dataset = make(20)
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    first, second = dataset.draw(8, generator), dataset.draw(8, generator)
    generator.set_state(state)
    torch.manual_seed(99)
    again = make(20).draw(8, generator)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_held_out_examples_are_the_same_at_every_call(make: Make) -> None:
    dataset = make(20)
    first = dataset.held_out(9)
    dataset.draw(3, torch.Generator())
    torch.manual_seed(99)
    for other in (dataset, make(20)):
        again = other.held_out(9)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in RANDOM])
def test_held_out_returns_fewer_examples_if_there_are_no_more(name: str) -> None:
    batch = MAKERS[name](20).held_out(10_000)
    assert 39 <= len(next(iter(batch.values()))) < 1000


def test_digest_identifies_the_data_and_its_settings(make: Make) -> None:
    assert make(20).digest == make(20).digest
    assert make(20).digest != make(21).digest
    assert len(make(20).digest) == 64
    int(make(20).digest, 16)


def test_digest_depends_on_the_content() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of("1") != digest_of(1) != digest_of(b"1")
    other = corpus_from_bytes(bytes(5000), "lines")
    assert ByteWindows(other, 9).digest != ByteWindows(CORPUS, 9).digest
    assert TokenWindows(CORPUS, Tokens(), 9).digest != TokenWindows(CORPUS, BYTES, 9).digest
    settings = {"tokens": BYTES, "longest": 9, "name": ""}
    pairs = {
        pair_texts(train, [("c", "d")], **settings).digest  # type: ignore[arg-type]
        for train in ([("a", "b")], [("b", "a")], [("a", "c")])
    }
    texts = [[[b"ab", b"c"], [b"d"]], [[b"a", b"bc"], [b"d"]], [[b"ab"], [b"c", b"d"]]]
    labelled = {
        label_texts(text, [[b"e"], [b"f"]], classes=("x", "y"), **settings).digest  # type: ignore[arg-type]
        for text in texts
    }
    assert len(pairs) == len(labelled) == 3


def test_source_is_the_absolute_path_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for class_folder in ("train/neg", "train/pos", "test/neg", "test/pos"):
        (tmp_path / "films" / class_folder).mkdir(parents=True)
        (tmp_path / "films" / class_folder / "0_1.txt").write_text("seen")
    assert load_reviews("films").source == str(tmp_path / "films")
    for name in ("train.de", "train.en", "val.de", "val.en"):
        (tmp_path / "films" / name).write_text("x\n")
    assert load_pairs("films", tokens=BYTES).source == str(tmp_path / "films")
    assert MAKERS["pairs"](20).source is None


def test_evenly_spaced_includes_both_ends() -> None:
    assert evenly_spaced(10, 4).tolist() == [0, 3, 6, 9]
    assert evenly_spaced(3, 9).tolist() == [0, 1, 2]
    assert evenly_spaced(5, 1).tolist() == [0]


def test_rows_are_gathered_in_the_given_order_and_padded() -> None:
    given = [torch.randint(1, 10, (length,)) for length in (3, 0, 5, 1)]
    ragged = RaggedTokens.of(given)
    assert len(ragged) == 4
    assert all(torch.equal(ragged[number], row) for number, row in enumerate(given))
    tokens, lengths = ragged.padded(torch.tensor([3, 0, 1, 3]))
    assert lengths.tolist() == [1, 3, 0, 1]
    assert tokens.shape == (4, 3)
    assert tokens[1].tolist() == given[0].tolist()
    assert tokens[0].tolist() == tokens[3].tolist() == [int(given[3]), 0, 0]
    assert tokens[2].tolist() == [0, 0, 0]
    tokens, lengths = ragged.padded(torch.empty(0, dtype=torch.int64))
    assert tokens.shape == (0, 0)
    assert lengths.shape == (0,)


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(255, torch.uint8), (256, torch.int16), (32_767, torch.int16), (32_768, torch.int32)],
)
def test_values_have_the_narrowest_dtype(largest: int, dtype: torch.dtype) -> None:
    ragged = RaggedTokens.of([torch.tensor([largest, 0]), torch.tensor([1])])
    assert ragged.values.dtype == dtype
    assert ragged[0].tolist() == [largest, 0]


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


@each("text", ["<pad>", "[MASK]", "pad begin", "\x00\x01\x05"])
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


@each("token", [-1, 600])
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
