"""Tokens of text: bytes as they are, or pairs merged by what is frequent in a given text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_kernels.nn.options import check_positive
from transformer_kernels.optional_deps import require
from transformer_kernels.training.data.corpus import tensor_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

SPECIAL = ("pad", "begin", "end", "class", "separator", "mask")
"""The special tokens, where there are any: the first ones, in this order."""

PAD, BEGIN, END, CLASS, SEPARATOR, MASK = range(len(SPECIAL))

_LETTER = "A-Za-z\u0080-\u00ff"
_WORDS = f" ?[{_LETTER}]+| ?[0-9]+| ?[^{_LETTER}0-9\\s]+|\\s+"
"""No token is more than a word, a number or a run of signs, each with a space before it, or a run
of white space. The library gets each byte as the character of its number; those beyond ASCII count
as letters."""

_CHUNK = 1 << 14
_BATCH = 256
"""Bytes of a long text that are encoded by themselves, and how many texts the library gets at a
time: it needs a hundred bytes of memory for each token."""

_NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Tokens:
    """From bytes to tokens and back, exactly, whatever the bytes are.

    `Tokens()` makes each byte a token; `train_tokens` finds pairs to merge. Special tokens are
    numbers that no text is ever encoded to, and are decoded to nothing.
    """

    merges: tuple[tuple[int, int], ...] = ()
    """Tokens that become one, the most frequent ones first: 0 to 255 are the bytes, and each merge
    adds the next number, unless there is a token of those bytes already. Special tokens are not
    counted here."""
    special: bool = False
    """Whether there are the tokens of `SPECIAL`, before all others"""

    @property
    def first(self) -> int:
        """The first token that is not a special one."""
        return len(SPECIAL) if self.special else 0

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, special ones included."""
        return self.first + len(self._pieces)

    def check_special(self) -> None:
        """ValueError unless there are special tokens."""
        if not self.special:
            raise ValueError(
                "tokens must have special tokens, as train_tokens(..., special=True) and "
                "Tokens(special=True) give them, and have none"
            )

    def encode(self, text: bytes | str) -> Tensor:
        """(tokens,) int64; a string is encoded as UTF-8.

        ImportError where there are merges and the library tokenizers is missing.
        """
        return torch.cat([_NOTHING, *self.encode_all(_chunks(_as_bytes(text)))])

    def encode_all(self, texts: Iterable[bytes | str]) -> list[Tensor]:
        """`encode` of each, for many texts that are not long."""
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
        """The bytes of tokens (tokens,); ValueError where one is outside of the vocabulary."""
        numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        for token in numbers:
            if not 0 <= token < self.vocabulary:
                raise ValueError(
                    f"tokens must be at least 0 and below {self.vocabulary}, got {token}"
                )
        first = self.first
        return b"".join(self._pieces[token - first] for token in numbers if token >= first)

    def to_json(self) -> str:
        """A string from which `from_json` makes the same tokens, for a checkpoint."""
        return json.dumps({"special": self.special, "merges": self.merges})

    @staticmethod
    def from_json(text: str) -> Tokens:
        """The tokens that `to_json` wrote down; ValueError for any other string."""
        try:
            fields = json.loads(text)
            merges = tuple((int(left), int(right)) for left, right in fields["merges"])
            tokens = Tokens(merges, fields["special"] is True)
            tokens._pieces  # noqa: B018  (reads every merge)
        except (ValueError, TypeError, KeyError, IndexError):
            raise ValueError(
                f"text must be what Tokens.to_json wrote, got {text[:40]!r}, which is not"
            ) from None
        return tokens

    @cached_property
    def _pieces(self) -> tuple[bytes, ...]:
        """The bytes of each token that is not special."""
        pieces = [bytes([value]) for value in range(256)]
        known = set(pieces)
        for left, right in self.merges:
            if min(left, right) < 0:
                raise IndexError(f"there is no token {min(left, right)}")
            piece = pieces[left] + pieces[right]
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
    """Byte pairs of `text` merged, the most frequent first, until there are `vocabulary` tokens,
    special ones included, or no pair is left that occurs twice.

    The same text gives the same tokens. ValueError where `vocabulary` is below 256, or 262 with
    special tokens: every byte is a token. ImportError where the library tokenizers is missing.
    """
    check_positive("vocabulary", vocabulary)
    least = Tokens(special=special).vocabulary
    if vocabulary < least:
        raise ValueError(
            f"vocabulary must be at least {least}, 256 bytes and {least - 256} special tokens, "
            f"got {vocabulary}"
        )
    require("tokenizers", extra="train")
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = _tokenizer(BPE())
    trainer = BpeTrainer(
        vocab_size=256 + vocabulary - least,
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


def _as_bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text
