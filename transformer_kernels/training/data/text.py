"""Text as bytes: loading, the split into training and validation, and windows of it."""

from __future__ import annotations

import ctypes
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...nn.options import check_positive
from .dataset import Batch, digest_of, evenly_spaced
from .tokens import Tokens, tensor_of

HELD_OUT = 0.1
"""Share of a text, at its end, that is held out for validation."""

STANDARD_LIBRARY_BYTES = 8_000_000
"""Size of the default corpus; all sources together have about 10 MB."""

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
    root = standard_library_folder()
    parts: list[bytes] = []
    size = 0
    for path in python_files(root):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if not parts:
        raise FileNotFoundError(f"no Python sources in {root}: specify a text file instead")
    return b"".join(parts)[:limit]


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
    """Base of the datasets of one corpus: their name and source."""

    corpus: Corpus

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def source(self) -> str | None:
        return self.corpus.source

    def check_length(self, train: int, validation: int, context: int, unit: str) -> None:
        """Raises ValueError unless each part is longer than a context."""
        for part, length in (("training", train), ("validation", validation)):
            if length <= context:
                raise ValueError(
                    f"{self.name} is too short: a context of {context} needs {context + 1} {unit} "
                    f"in each part, and the {part} part has {length}"
                )


@dataclass(frozen=True)
class ByteWindows(CorpusDataset):
    """Dataset of windows of a corpus for next-byte prediction: {"tokens": (B, context + 1)}.

    A token is a byte. Raises ValueError if a part of the corpus is shorter than a window.
    """

    context: int

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        train, validation = self.corpus.train, self.corpus.validation
        self.check_length(len(train), len(validation), self.context, "bytes")

    @cached_property
    def digest(self) -> str:
        return digest_of("byte windows", self.corpus.digest, self.context)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        return {"tokens": _random_windows(self.corpus.train, self.context + 1, count, generator)}

    def held_out(self, count: int) -> Batch:
        return {"tokens": _even_windows(self.corpus.validation, self.context + 1, count)}


@dataclass(frozen=True)
class ByteLanes(ByteWindows):
    """Dataset of windows of a corpus that is also read in lanes: {"tokens": (B, context + 1)}.

    Lanes are equal parts of the text. The last byte of a segment, a target only, is the first input
    of the next one. The bytes at the end that do not fill a segment are left out.
    """

    @cached_property
    def digest(self) -> str:
        return digest_of("byte lanes", self.corpus.digest, self.context)

    def segments(self, lanes: int) -> int:
        check_positive("lanes", lanes)
        count = _lane_length(self.corpus.train, lanes) // self.context
        if count == 0:
            raise ValueError(
                f"{self.name} is too short: {lanes} lanes with a context of {self.context} need "
                f"{lanes * self.context + 1} bytes in the training part, which has "
                f"{len(self.corpus.train)}"
            )
        return count

    def segment(self, number: int, lanes: int) -> Batch:
        return self._segment(self.corpus.train, number, lanes)

    def held_out_segments(self, lanes: int) -> Iterator[Batch]:
        check_positive("lanes", lanes)
        text = self.corpus.validation
        lanes = min(lanes, (len(text) - 1) // self.context)
        count = _lane_length(text, lanes) // self.context
        return (self._segment(text, number, lanes) for number in range(count))

    def _segment(self, text: Tensor, number: int, lanes: int) -> Batch:
        starts = torch.arange(lanes) * _lane_length(text, lanes) + number * self.context
        return {"tokens": _windows(text, starts, self.context + 1)}


@dataclass(frozen=True)
class TokenWindows(CorpusDataset):
    """Dataset of windows of a tokenized corpus: {"tokens": (B, context + 1)}.

    Holds out the same bytes as `ByteWindows`, so that bits per byte are comparable. Raises
    ValueError if a part of the corpus is shorter than a window.
    """

    tokens: Tokens
    """Tokenizer; train it on the training part of the corpus only"""
    context: int

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        self.check_length(len(self._train), len(self._validation), self.context, "tokens")

    @cached_property
    def digest(self) -> str:
        return digest_of("token windows", self.corpus.digest, self.tokens.to_json(), self.context)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token of the held-out text, to convert nats per token to bits per byte."""
        return len(self.corpus.validation) / len(self._validation)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        return {"tokens": _random_windows(self._train, self.context + 1, count, generator)}

    def held_out(self, count: int) -> Batch:
        return {"tokens": _even_windows(self._validation, self.context + 1, count)}

    @cached_property
    def _train(self) -> Tensor:
        """int32, (tokens,)."""
        return self.tokens.encode(bytes_of(self.corpus.train)).int()

    @cached_property
    def _validation(self) -> Tensor:
        """int32, (tokens,)."""
        return self.tokens.encode(bytes_of(self.corpus.validation)).int()


def _random_windows(text: Tensor, size: int, count: int, generator: torch.Generator) -> Tensor:
    """(count, size) int64."""
    return _windows(text, torch.randint(len(text) - size + 1, (count,), generator=generator), size)


def _even_windows(text: Tensor, size: int, count: int) -> Tensor:
    """Windows evenly spaced over the whole text: (up to count, size) int64."""
    return _windows(text, evenly_spaced(len(text) - size + 1, count), size)


def _lane_length(text: Tensor, lanes: int) -> int:
    """Length of a lane, without the element after it."""
    return (len(text) - 1) // lanes


def _windows(text: Tensor, starts: Tensor, size: int) -> Tensor:
    return text.unfold(0, size, 1)[starts].long()
