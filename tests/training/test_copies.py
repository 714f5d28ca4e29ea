"""Copies of random words: their form, the held-out part, errors."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels.training.data import Copies

DATA = Copies(context=10, vocabulary=12)


def test_a_text_is_a_word_twice_with_a_separator_before_each() -> None:
    tokens = DATA.draw(200, torch.Generator().manual_seed(0))["tokens"]
    assert tokens.shape == (200, 10)
    assert tokens.dtype == torch.int64
    first, second = tokens.split(5, dim=1)
    assert torch.equal(first, second)
    assert (first[:, 0] == 0).all()
    assert set(first[:, 1:].unique().tolist()) == set(range(1, 12))


def test_texts_follow_the_generator() -> None:
    first, again, other = (
        DATA.draw(7, torch.Generator().manual_seed(seed))["tokens"] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_held_out_words_are_the_same_at_every_call_and_never_drawn() -> None:
    small = Copies(context=6, vocabulary=12)  # 121 words of two symbols
    held_out = small.held_out(500)["tokens"]
    assert torch.equal(held_out, small.held_out(500)["tokens"])
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


@pytest.mark.parametrize(
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
