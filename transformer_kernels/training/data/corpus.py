"""Text as bytes: loading, the split into training and validation, and windows of bytes."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...nn.options import check_positive
from .dataset import Batch, digest_of
from .standard_library import standard_library_text
from .windows import draw_windows, even_windows

HELD_OUT = 0.1
"""Share of a text, at its end, that is held out for validation."""


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

    def check_length(self, context: int) -> None:
        """Raises ValueError unless each part has at least `context` + 1 bytes."""
        for part, text in (("training", self.train), ("validation", self.validation)):
            if len(text) <= context:
                raise ValueError(
                    f"{self.name} is too short: a context of {context} needs {context + 1} bytes "
                    f"in each part, and the {part} part has {len(text)}"
                )


@dataclass(frozen=True)
class ByteWindows:
    """Dataset of windows of a corpus for next-byte prediction: {"tokens": (B, context + 1)}.

    A token is a byte. Raises ValueError if a part of the corpus is shorter than a window.
    """

    corpus: Corpus
    context: int

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        self.corpus.check_length(self.context)

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def source(self) -> str | None:
        return self.corpus.source

    @cached_property
    def digest(self) -> str:
        return digest_of("byte windows", self.corpus.digest, self.context)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Random windows: the same as those of `draw_batch` for the same generator state."""
        return {
            "tokens": draw_windows(
                self.corpus.train, count=count, size=self.context + 1, generator=generator
            )
        }

    def held_out(self, count: int) -> Batch:
        """Evenly spaced windows, as those of `even_batch`."""
        return {"tokens": even_windows(self.corpus.validation, count=count, size=self.context + 1)}


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


def tensor_of(text: bytes) -> Tensor:
    """Copies bytes to a uint8 tensor (bytes,)."""
    if not text:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def bytes_of(text: Tensor) -> bytes:
    """Copies a contiguous uint8 CPU tensor (bytes,) to bytes."""
    return ctypes.string_at(text.data_ptr(), len(text))


def draw_batch(
    text: Tensor, *, batch: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws `batch` random windows; the target of a byte is the next byte.

    Returns:
        (inputs, targets), each (batch, context) int64.
    """
    windows = draw_windows(text, count=batch, size=context + 1, generator=generator)
    return windows[:, :-1], windows[:, 1:]


def even_batch(text: Tensor, *, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Up to `batch` windows evenly spaced over the text, the same at every call.

    Returns:
        (inputs, targets), each (up to batch, context) int64.
    """
    windows = even_windows(text, count=batch, size=context + 1)
    return windows[:, :-1], windows[:, 1:]
