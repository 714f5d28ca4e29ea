"""Tests of BERT's training input."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from transformer_kernels.training.data import (
    CLASS,
    IGNORE_INDEX,
    MASK,
    SEPARATOR,
    Batch,
    MaskedSentences,
    Tokens,
    bytes_of,
    corpus_from_bytes,
    train_tokens,
)
from transformer_kernels.training.data.masking import mask_tokens

CORPUS = corpus_from_bytes(
    b"".join(b"%d: %s\n" % (i, b"so " * (i * i % 7)) + b"\n" * (i % 2) for i in range(2000)),
    "lines",
)
TOKENS = train_tokens(bytes_of(CORPUS.train), 400, special=True)


def within(count: int, total: int, share: float) -> bool:
    """True if a binomial count is within four standard deviations of its mean."""
    return abs(count - share * total) < 4 * math.sqrt(share * (1 - share) * total)


@pytest.fixture(scope="module")
def dataset() -> MaskedSentences:
    return MaskedSentences(CORPUS, TOKENS, 40)


@pytest.fixture(scope="module")
def batch(dataset: MaskedSentences) -> Batch:
    return dataset.draw(1000, torch.Generator().manual_seed(0))


def segments(batch: Batch, row: int) -> tuple[bytes, bytes]:
    """The two segments of an example before masking."""
    length = batch["lengths"][row]
    tokens, labels = batch["tokens"][row, :length], batch["labels"][row, :length]
    whole = tokens.where(labels == IGNORE_INDEX, labels)
    first, second = ((whole == SEPARATOR).nonzero().flatten()).tolist()
    return TOKENS.decode(whole[1:first]), TOKENS.decode(whole[first + 1 : second])


def test_example_layout_is_class_segment_separator_segment_separator(batch: Batch) -> None:
    assert (batch["tokens"][:, 0] == CLASS).all()
    assert ((batch["tokens"] == SEPARATOR).sum(1) == 2).all()
    for row, length in enumerate(batch["lengths"].tolist()):
        first, second = (batch["tokens"][row] == SEPARATOR).nonzero().flatten().tolist()
        assert second == length - 1 <= 39
        assert 1 < first < second - 1
        padding = batch["tokens"].shape[1] - length
        kinds = [0] * (first + 1) + [1] * (second - first) + [0] * padding
        assert batch["segments"][row].tolist() == kinds


def test_half_of_the_second_segments_follow_the_first(batch: Batch) -> None:
    assert within(int(batch["is_next"].sum()), 1000, 0.5)
    lines = [line for line in bytes_of(CORPUS.train).splitlines(keepends=True) if line.strip()]
    following = dict(pairwise(lines))
    starts = {line.split(b":")[0]: line for line in lines}
    for row, is_next in enumerate(batch["is_next"].tolist()):
        first, second = segments(batch, row)
        last = starts[first.splitlines()[-1].split(b":")[0]]
        follows = second.splitlines()[0].split(b":")[0] == following[last].split(b":")[0]
        assert follows == bool(is_next)
        assert not set(first.splitlines()) & set(second.splitlines())


def test_segments_are_lines_of_the_right_part_of_the_corpus(
    dataset: MaskedSentences, batch: Batch
) -> None:
    def without_empty_lines(text: bytes) -> bytes:
        return b"".join(line for line in text.splitlines(keepends=True) if line.strip())

    for examples, text in (
        (batch, without_empty_lines(bytes_of(CORPUS.train))),
        (dataset.held_out(100), b"\n" + without_empty_lines(bytes_of(CORPUS.validation))),
    ):
        for row in range(100):
            first, second = segments(examples, row)
            assert first in text
            assert b"\n" + second in b"\n" + text


def test_masking_probabilities_match_the_paper(batch: Batch) -> None:
    tokens, labels = batch["tokens"], batch["labels"]
    selected = labels != IGNORE_INDEX
    special = (tokens == CLASS) | (tokens == SEPARATOR)
    valid = torch.arange(tokens.shape[1]) < batch["lengths"][:, None]
    assert not (selected & (special | ~valid)).any()
    ordinary = int((valid & ~special).sum())
    chosen = int(selected.sum())
    assert within(chosen, ordinary, 0.15)
    assert within(int((tokens[selected] == MASK).sum()), chosen, 0.8)
    same = int((tokens[selected] == labels[selected]).sum())
    assert within(same, chosen, 0.1 + 0.1 / (TOKENS.vocabulary - 6))
    others = tokens[selected][(tokens[selected] != MASK) & (tokens[selected] != labels[selected])]
    assert others.min() >= 6
    assert len(others.unique()) > 100
    assert (tokens[~selected] != MASK).all()


def test_every_example_has_a_selected_token() -> None:
    short = MaskedSentences(corpus_from_bytes(b"a\nb\nc\n" * 100, "abc"), Tokens(special=True), 8)
    labels = short.draw(300, torch.Generator())["labels"]
    assert ((labels != IGNORE_INDEX).sum(1) >= 1).all()


def test_special_tokens_are_never_selected() -> None:
    tokens = torch.tensor([[CLASS, SEPARATOR], [CLASS, 9]])
    ordinary = torch.tensor([[False, False], [False, True]])
    masked, labels = mask_tokens(tokens, ordinary, TOKENS, torch.Generator())
    assert labels.tolist() == [[IGNORE_INDEX] * 2, [IGNORE_INDEX, 9]]
    assert masked[0].tolist() == [CLASS, SEPARATOR]
    assert masked[1, 0] == CLASS


def test_line_longer_than_a_segment_is_cut() -> None:
    text = b"".join(b"%d" % (i % 10) * 50 + b"\n" for i in range(400))
    dataset = MaskedSentences(corpus_from_bytes(text, "long"), Tokens(special=True), 30)
    batch = dataset.draw(50, torch.Generator())
    assert (batch["lengths"] == 30).all()


def test_random_second_segment_does_not_overlap_the_first() -> None:
    """The first segment has six of 40 lines."""
    text = b"".join(b"%c\n" % (40 + i % 40) for i in range(400))
    dataset = MaskedSentences(corpus_from_bytes(text, "signs"), Tokens(special=True), 27)
    batch = dataset.held_out(39)
    elsewhere = 0
    for row, is_next in enumerate(batch["is_next"].tolist()):
        first, second = (segment.split(b"\n")[:-1] for segment in segments(batch, row))
        assert second[0] not in first
        elsewhere += not is_next
    assert elsewhere > 10


def test_random_second_segment_differs_from_the_next_line() -> None:
    """Nine of ten lines are equal."""
    text = b"".join(b"same\n" * 9 + b"%d\n" % i for i in range(100))
    tokens = Tokens(special=True)
    batch = MaskedSentences(corpus_from_bytes(text, "x"), tokens, 14).draw(200, torch.Generator())
    followed = 0
    for row, is_next in enumerate(batch["is_next"].tolist()):
        first, second = segments(batch, row)
        if not first.endswith(b"same\n") and not is_next:
            followed += 1
            assert not second.startswith(b"same")
    assert followed > 2


def test_text_of_equal_lines_is_refused() -> None:
    corpus = corpus_from_bytes(b"same\n" * 1000, "same")
    with pytest.raises(ValueError, match="the text must have different lines"):
        MaskedSentences(corpus, Tokens(special=True), 16).draw(20, torch.Generator())


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (7, "context must be at least 8 for two segments and three special tokens, got 7"),
        (0, "context must be a whole number of at least 1, got 0"),
        (201, "lines is too short: a context of 201 needs .* the validation part has 192"),
    ],
)
def test_invalid_context_is_refused(context: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedSentences(CORPUS, TOKENS, context)


def test_tokenizer_without_special_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens must have special tokens"):
        MaskedSentences(CORPUS, Tokens(), 20)
