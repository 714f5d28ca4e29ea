"""Texts as bytes: loading, the split into training and validation, windows, masked sentences."""

from __future__ import annotations

import ctypes
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ...nn.options import check_positive
from .dataset import Batch, RaggedTokens, digest_of, evenly_spaced, pad_rows
from .tokens import CLASS, MASK, SEPARATOR, Tokens, tensor_of

HELD_OUT = 0.1
"""Share of a text, at its end, that is held out for validation."""

STANDARD_LIBRARY_BYTES = 8_000_000
"""Size of the default corpus; all sources together have about 10 MB."""

SELECTED = 0.15
"""Share of ordinary (not special) tokens that are selected for prediction."""

MASKED = 0.8
REPLACED = 0.1
"""Shares of the selected tokens that become MASK, and that become a random token. The rest stays
unchanged."""

IGNORE_INDEX = -100
"""Label of tokens that are not predicted; the default `ignore_index` of torch's cross_entropy."""

_LEAST_CONTEXT = 8

_CLASS = torch.tensor([CLASS])
_SEPARATOR = torch.tensor([SEPARATOR])

_EXCLUDED = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "msilib", "pydoc_data"),  # tables
}


@dataclass(frozen=True)
class Corpus:
    """A text as bytes, split into a training and a validation part."""

    name: str
    """Display name"""
    source: str | None
    """Absolute path of its file, or None"""
    train: Tensor
    """uint8, (bytes,)"""
    validation: Tensor
    """uint8, (bytes,): the end of the text"""
    digest: str
    """SHA-256 of the whole text, in hexadecimal"""


def corpus_from_bytes(text: bytes, name: str, *, source: str | None = None) -> Corpus:
    """Splits `text` into a training part and the last tenth, which is held out."""
    values = tensor_of(text)
    cut = len(text) - int(len(text) * HELD_OUT)
    return Corpus(name, source, values[:cut], values[cut:], hashlib.sha256(text).hexdigest())


def load_corpus(path: Path | str | None = None) -> Corpus:
    """Loads a text as bytes and splits it.

    Args:
        path: any file, for example enwik8; None uses `standard_library_text`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty.
    """
    if path is None:
        return corpus_from_bytes(standard_library_text(), "the Python standard library")
    path = Path(path)
    text = path.read_bytes()
    if not text:
        raise ValueError(f"{path} is empty: expected a text to train on")
    return corpus_from_bytes(text, str(path), source=str(path.resolve()))


def standard_library_folder() -> Path:
    """Folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library_text(limit: int = STANDARD_LIBRARY_BYTES) -> bytes:
    """The first `limit` bytes of the standard library's sources, concatenated in path order.

    Excludes tests, tables and installed packages. The text depends only on the Python version.

    Raises:
        FileNotFoundError: this Python has no sources.
    """
    root, text = standard_library_folder(), bytearray()
    for path in python_files(root):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources in {root}: specify a text file instead")
    return bytes(text[:limit])


def python_files(folder: Path) -> Iterator[Path]:
    """Yields the sources below `folder` in path order, except tests, tables and packages."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _EXCLUDED:
                yield from python_files(path)
        elif path.suffix == ".py":
            yield path


def bytes_of(text: Tensor) -> bytes:
    """Copies a contiguous uint8 CPU tensor (bytes,) to bytes."""
    return ctypes.string_at(text.data_ptr(), len(text))


@dataclass(frozen=True)
class CorpusDataset:
    """Base of the datasets of one corpus: their name, source and digest."""

    kind: ClassVar[str]
    """Part of the digest"""
    corpus: Corpus

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def source(self) -> str | None:
        return self.corpus.source

    @cached_property
    def digest(self) -> str:
        _, *settings = (getattr(self, field.name) for field in fields(self))
        texts = (x.to_json() if isinstance(x, Tokens) else x for x in settings)
        return digest_of(self.kind, self.corpus.digest, *texts)


class Windows(CorpusDataset):
    """Base of the datasets of windows of a corpus: {"tokens": (B, context + 1)}.

    Raises ValueError if a part of the corpus is shorter than a window.
    """

    unit: ClassVar[str]
    context: int

    @property
    def train(self) -> Tensor:
        """Elements of the training part, (elements,)."""
        return self.corpus.train

    @property
    def validation(self) -> Tensor:
        return self.corpus.validation

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        for part, text in (("training", self.train), ("validation", self.validation)):
            if len(text) <= self.context:
                raise ValueError(
                    f"{self.name} is too short: a context of {self.context} needs "
                    f"{self.context + 1} {self.unit} in each part, and the {part} part has "
                    f"{len(text)}"
                )

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        last = len(self.train) - self.context
        starts = torch.randint(last, (count,), generator=generator)
        return self._windows(self.train, starts)

    def held_out(self, count: int) -> Batch:
        last = len(self.validation) - self.context
        return self._windows(self.validation, evenly_spaced(last, count))

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        return {"tokens": text.unfold(0, self.context + 1, 1)[starts].long()}


@dataclass(frozen=True)
class ByteWindows(Windows):
    """Windows of a corpus for next-byte prediction; a token is a byte."""

    kind = "byte windows"
    unit = "bytes"
    context: int


@dataclass(frozen=True)
class ByteLanes(ByteWindows):
    """Windows of a corpus that is also read in lanes.

    Lanes are equal parts of the text. The last byte of a segment, a target only, is the first input
    of the next one. The bytes at the end that do not fill a segment are left out.
    """

    kind = "byte lanes"

    def segments(self, lanes: int) -> int:
        check_positive("lanes", lanes)
        count = _lane_length(self.train, lanes) // self.context
        if count == 0:
            raise ValueError(
                f"{self.name} is too short: {lanes} lanes with a context of {self.context} need "
                f"{lanes * self.context + 1} bytes in the training part, which has "
                f"{len(self.train)}"
            )
        return count

    def segment(self, number: int, lanes: int) -> Batch:
        return self._segment(self.train, number, lanes)

    def held_out_segments(self, lanes: int) -> Iterator[Batch]:
        check_positive("lanes", lanes)
        text = self.validation
        lanes = min(lanes, (len(text) - 1) // self.context)
        count = _lane_length(text, lanes) // self.context
        return (self._segment(text, number, lanes) for number in range(count))

    def _segment(self, text: Tensor, number: int, lanes: int) -> Batch:
        starts = torch.arange(lanes) * _lane_length(text, lanes) + number * self.context
        return self._windows(text, starts)


@dataclass(frozen=True)
class TokenWindows(Windows):
    """Windows of a tokenized corpus for next-token prediction.

    Holds out the same bytes as `ByteWindows`, so that bits per byte are comparable.
    """

    kind = "token windows"
    unit = "tokens"
    tokens: Tokens
    """Tokenizer; train it on the training part of the corpus only"""
    context: int

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token of the held-out text, to convert nats per token to bits per byte."""
        return len(self.corpus.validation) / len(self.validation)

    @cached_property
    def train(self) -> Tensor:
        """int32, (tokens,)."""
        return self.tokens.encode(bytes_of(self.corpus.train)).int()

    @cached_property
    def validation(self) -> Tensor:
        return self.tokens.encode(bytes_of(self.corpus.validation)).int()


def _lane_length(text: Tensor, lanes: int) -> int:
    """Length of a lane, without the element after it."""
    return (len(text) - 1) // lanes


@dataclass(frozen=True)
class MaskedSentences(CorpusDataset):
    """BERT's training input: masked pairs of segments, with at most `context` tokens per pair.

    {"tokens": (B, T), "segments": (B, T), "lengths": (B,), "labels": (B, T), "is_next": (B,)}:

    - `tokens`: CLASS, first segment, SEPARATOR, second segment, SEPARATOR. A segment is as many
      rows lines of the text as fit, or the start of a line that is too long. Empty lines are
      skipped.
    - `segments`: 0 up to and including the first separator, 1 up to and including the second, 0 in
      the padding.
    - `is_next`: 1 for half of the examples, whose second segment follows the first one; 0 if it is
      a random segment with a different first line.
    - `labels`: the original token where a token is selected, IGNORE_INDEX elsewhere. Each ordinary
      token is selected with probability `SELECTED`, and at least one per example.

    Raises ValueError if a part of the corpus has too few lines.

    Source: BERT (Devlin et al. 2018), section 3.1.
    """

    kind = "masked sentences"
    tokens: Tokens
    """Tokenizer with special tokens; train it on the training part of the corpus only"""
    context: int

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        self.tokens.check_special()
        if self.context < _LEAST_CONTEXT:
            raise ValueError(
                f"context must be at least {_LEAST_CONTEXT} for two segments and three special "
                f"tokens, got {self.context}"
            )
        for part, lines in (("training", self._train), ("validation", self._validation)):
            if len(lines) < self.context:
                raise ValueError(
                    f"{self.name} is too short: a context of {self.context} needs as many "
                    f"non-empty lines in each part, and the {part} part has {len(lines)}"
                )

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        firsts = torch.randint(len(self._train) - 1, (count,), generator=generator)
        return self._batch(self._train, firsts, generator)

    def held_out(self, count: int) -> Batch:
        """Evenly spaced first segments; the rest is drawn with a fixed seed."""
        firsts = evenly_spaced(len(self._validation) - 1, count)
        return self._batch(self._validation, firsts, torch.Generator().manual_seed(0))

    def _batch(self, lines: RaggedTokens, firsts: Tensor, generator: torch.Generator) -> Batch:
        is_next = torch.randint(2, (len(firsts),), generator=generator)
        rows: list[Tensor] = []
        second_starts: list[int] = []
        for first, follows in zip(firsts.tolist(), is_next.tolist(), strict=True):
            capacity = self.context - 3
            first_segment, end = _segment(lines, first, capacity // 2, len(lines) - 1)
            start = end if follows else _random_other_line(lines, first, end, generator)
            second_segment, _ = _segment(lines, start, capacity - len(first_segment), len(lines))
            rows.append(torch.cat([_CLASS, first_segment, _SEPARATOR, second_segment, _SEPARATOR]))
            second_starts.append(len(first_segment) + 2)
        tokens, lengths = pad_rows(rows)
        positions = torch.arange(tokens.shape[1])
        second = torch.tensor(second_starts)[:, None]
        valid = positions < lengths[:, None]
        ordinary = valid & (tokens >= self.tokens.first)
        tokens, labels = mask_tokens(tokens, ordinary, self.tokens, generator)
        return {
            "tokens": tokens,
            "segments": (valid & (positions >= second)).long(),
            "lengths": lengths,
            "labels": labels,
            "is_next": is_next,
        }

    @cached_property
    def _train(self) -> RaggedTokens:
        return _lines(self.corpus.train, self.tokens)

    @cached_property
    def _validation(self) -> RaggedTokens:
        return _lines(self.corpus.validation, self.tokens)


def mask_tokens(
    tokens: Tensor, ordinary: Tensor, vocabulary: Tokens, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Selects tokens for prediction, and masks or replaces them: (B, T) int64.

    Only those that are `ordinary`, (B, T) bool, are selected; at least one in each row that has
    any. Returns the model's input and the labels, both (B, T) int64.
    """
    scores = torch.rand(tokens.shape, generator=generator).where(ordinary, 2.0)
    lowest = scores.amin(1, keepdim=True)
    selected = ordinary & ((scores < SELECTED) | (scores == lowest))
    kinds = torch.rand(tokens.shape, generator=generator)
    replacements = torch.randint(
        vocabulary.first, vocabulary.vocabulary, tokens.shape, generator=generator
    )
    masked = replacements.where(kinds < MASKED + REPLACED, tokens).masked_fill(kinds < MASKED, MASK)
    return masked.where(selected, tokens), tokens.where(selected, IGNORE_INDEX)


def _lines(text: Tensor, tokens: Tokens) -> RaggedTokens:
    lines = bytes_of(text).splitlines(keepends=True)
    return RaggedTokens.of(tokens.encode_all(line for line in lines if line.strip()))


def _segment(lines: RaggedTokens, first: int, capacity: int, limit: int) -> tuple[Tensor, int]:
    """Up to `capacity` tokens of lines [first, limit), and the end of the lines used."""
    start = int(lines.starts[first])
    fitting_end = int(torch.searchsorted(lines.starts, start + capacity, right=True)) - 1
    end = min(max(fitting_end, first + 1), limit)
    return lines.values[start : min(int(lines.starts[end]), start + capacity)].long(), end


def _random_other_line(
    lines: RaggedTokens, first: int, end: int, generator: torch.Generator
) -> int:
    """A random line outside of `first` to `end` whose text differs from that of line `end`."""
    others = len(lines) - (end + 1 - first)
    drawn = int(torch.randint(others, (), generator=generator))
    next_line = lines[end]
    for step in range(others):
        line = (end + 1 + (drawn + step) % others) % len(lines)
        if not torch.equal(lines[line], next_line):
            return line
    raise ValueError("the text must have different lines, and too many are equal")
