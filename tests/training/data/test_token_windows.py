"""Tests of token windows."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels.training.data import (
    ByteWindows,
    Tokens,
    TokenWindows,
    bytes_of,
    corpus_from_bytes,
    standard_library_text,
    train_tokens,
)

CORPUS = corpus_from_bytes(standard_library_text(50_000), "sources")
TOKENS = train_tokens(bytes_of(CORPUS.train), 500)


def test_draw_returns_windows_of_the_training_part() -> None:
    windows = TokenWindows(CORPUS, TOKENS, 16)
    drawn = windows.draw(50, torch.Generator())["tokens"]
    assert drawn.shape == (50, 17)
    for row in drawn:
        assert TOKENS.decode(row) in bytes_of(CORPUS.train)


def test_held_out_windows_include_both_ends() -> None:
    held_out = TokenWindows(CORPUS, TOKENS, 16).held_out(20)["tokens"]
    text = bytes_of(CORPUS.validation)
    assert held_out.shape == (20, 17)
    assert text.startswith(TOKENS.decode(held_out[0]))
    assert text.endswith(TOKENS.decode(held_out[-1]))


def test_bytes_per_token_is_that_of_the_held_out_text() -> None:
    windows = TokenWindows(CORPUS, TOKENS, 16)
    count = len(TOKENS.encode(bytes_of(CORPUS.validation)))
    assert windows.bytes_per_token == len(CORPUS.validation) / count > 1.5
    assert TokenWindows(CORPUS, Tokens(), 16).bytes_per_token == 1


def test_windows_of_byte_tokens_equal_byte_windows() -> None:
    ours, theirs = TokenWindows(CORPUS, Tokens(), 16), ByteWindows(CORPUS, 16)
    first, second = (d.draw(5, torch.Generator().manual_seed(1)) for d in (ours, theirs))
    assert torch.equal(first["tokens"], second["tokens"])
    assert torch.equal(ours.held_out(5)["tokens"], theirs.held_out(5)["tokens"])


def test_too_short_text_is_refused() -> None:
    corpus = corpus_from_bytes(b"abc" * 50, "notes.txt")
    refused = "notes.txt is too short: a context of 15 needs 16 tokens .* validation part has 15"
    with pytest.raises(ValueError, match=refused):
        TokenWindows(corpus, Tokens(), 15)
    TokenWindows(corpus, Tokens(), 14)
    with pytest.raises(ValueError, match="the training part has 0"):
        TokenWindows(corpus_from_bytes(b"", "empty"), Tokens(), 1)
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        TokenWindows(corpus, Tokens(), 0)
