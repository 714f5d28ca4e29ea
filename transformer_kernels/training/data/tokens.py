"""Tokenizer: single bytes, or byte-pair encoding trained on a text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...common.optional_deps import require
from ...nn.options import check_positive

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

SPECIAL = ("pad", "begin", "end", "class", "separator", "mask")
"""Names of the special tokens; their numbers are the first ones, in this order."""

PAD, BEGIN, END, CLASS, SEPARATOR, MASK = range(len(SPECIAL))

_LETTER = "A-Za-z\u0080-\u00ff"
_WORDS = f" ?[{_LETTER}]+| ?[0-9]+| ?[^{_LETTER}0-9\\s]+|\\s+"
"""Pre-tokenizer: a token never crosses a word, a number or a run of punctuation, each with an
optional leading space, or a run of white space. Bytes are passed to the library as Latin-1
characters; those beyond ASCII count as letters."""

_CHUNK = 1 << 14
"""Long texts are encoded in chunks of this many bytes, so that no token is longer."""

_BATCH = 256
"""Texts per call of the library, which needs a hundred bytes of memory per token."""

_EMPTY = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Tokens:
    """Lossless tokenizer of arbitrary bytes.

    `Tokens()` makes each byte a token. `train_tokens` trains byte-pair merges. No text is ever
    encoded to special tokens, and they decode to the empty string.
    """

    merges: tuple[tuple[int, int], ...] = ()
    """Pairs of tokens to merge, in training order. 0 to 255 are the bytes; each merge adds the next
    number, unless a token with the same bytes exists. These numbers exclude special tokens."""
    special: bool = False
    """True to put the tokens of `SPECIAL` before all others"""

    @property
    def first(self) -> int:
        """Number of the first ordinary token."""
        return len(SPECIAL) if self.special else 0

    @property
    def vocabulary(self) -> int:
        """Vocabulary size, including special tokens."""
        return self.first + len(self._pieces)

    def check_special(self) -> None:
        """Raises ValueError unless there are special tokens."""
        if not self.special:
            raise ValueError(
                "tokens must have special tokens, got none: use train_tokens(..., special=True) "
                "or Tokens(special=True)"
            )

    def encode(self, text: bytes | str) -> Tensor:
        """Encodes a text, a string as UTF-8: (tokens,) int64.

        Raises ImportError if there are merges, and the package tokenizers is missing.
        """
        return torch.cat([_EMPTY, *self.encode_all(_chunks(_as_bytes(text)))])

    def encode_all(self, texts: Iterable[bytes | str]) -> list[Tensor]:
        """Encodes many short texts; see `encode`."""
        contents = [_as_bytes(text) for text in texts]
        if not self.merges:
            return [tensor_of(content).long() + self.first for content in contents]
        rows: list[Tensor] = []
        for start in range(0, len(contents), _BATCH):
            batch = [content.decode("latin-1") for content in contents[start : start + _BATCH]]
            for encoding in self._library.encode_batch(batch):
                rows.append(torch.tensor(encoding.ids, dtype=torch.int64) + self.first)
        return rows

    def decode(self, tokens: Tensor | Iterable[int]) -> bytes:
        """Decodes tokens (tokens,) to bytes; ValueError for a token outside of the vocabulary."""
        numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        for token in numbers:
            if not 0 <= token < self.vocabulary:
                raise ValueError(
                    f"tokens must be at least 0 and below {self.vocabulary}, got {token}"
                )
        first = self.first
        return b"".join(self._pieces[token - first] for token in numbers if token >= first)

    def to_json(self) -> str:
        """Serializes the tokenizer to a string, for a checkpoint."""
        return json.dumps({"special": self.special, "merges": self.merges})

    @staticmethod
    def from_json(text: str) -> Tokens:
        """Inverse of `to_json`; ValueError for any other string."""
        try:
            fields = json.loads(text)
            merges = tuple((int(left), int(right)) for left, right in fields["merges"])
            tokens = Tokens(merges, fields["special"] is True)
            tokens._pieces  # noqa: B018  (reads every merge)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            raise ValueError(
                f"text must be a result of Tokens.to_json, got {str(text)[:40]!r}"
            ) from None
        return tokens

    @cached_property
    def _pieces(self) -> tuple[bytes, ...]:
        """The bytes of each ordinary token."""
        pieces = [bytes([value]) for value in range(256)]
        known = set(pieces)
        for left, right in self.merges:
            if min(left, right) < 0:
                raise IndexError(f"token {min(left, right)} does not exist")
            piece = pieces[left] + pieces[right]
            if len(piece) > _CHUNK:
                raise ValueError(f"a token has at most {_CHUNK} bytes, got {len(piece)}")
            if piece not in known:
                known.add(piece)
                pieces.append(piece)
        return tuple(pieces)

    @cached_property
    def _library(self) -> Tokenizer:
        require("tokenizers", extra="train")
        from tokenizers.models import BPE

        pieces = [piece.decode("latin-1") for piece in self._pieces]
        merges = [(pieces[left], pieces[right]) for left, right in self.merges]
        return _tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, merges))


def train_tokens(text: bytes | str, vocabulary: int, *, special: bool = False) -> Tokens:
    """Trains a byte-pair tokenizer; deterministic.

    Args:
        text: training text.
        vocabulary: number of tokens, including special ones; at least 256, or 262 with special
            tokens, because every byte is a token. Fewer result if no pair occurs twice.
        special: True to include the special tokens.

    Raises:
        ValueError: `vocabulary` is too small.
        ImportError: the package tokenizers is missing.
    """
    check_positive("vocabulary", vocabulary)
    smallest = Tokens(special=special).vocabulary
    if vocabulary < smallest:
        raise ValueError(
            f"vocabulary must be at least {smallest} (256 bytes and {smallest - 256} special "
            f"tokens), got {vocabulary}"
        )
    require("tokenizers", extra="train")
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = _tokenizer(BPE())
    trainer = BpeTrainer(
        vocab_size=256 + min(vocabulary - smallest, len(text)),  # more would only be reserved
        min_frequency=2,
        initial_alphabet=[chr(value) for value in range(256)],
        show_progress=False,
    )
    chunks = (chunk.decode("latin-1") for chunk in _chunks(_as_bytes(text)))
    tokenizer.train_from_iterator(chunks, trainer)
    numbers = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return Tokens(tuple((numbers[left], numbers[right]) for left, right in merges), special)


def _tokenizer(model: BPE) -> Tokenizer:
    from tokenizers import Regex, Tokenizer
    from tokenizers.pre_tokenizers import Split

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Split(Regex(_WORDS), "isolated")
    return tokenizer


def _chunks(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), _CHUNK):
        yield content[start : start + _CHUNK]


def tensor_of(text: bytes) -> Tensor:
    """Copies bytes to a uint8 tensor (bytes,)."""
    if not text:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _as_bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text
