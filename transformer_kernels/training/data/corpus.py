"""Text as bytes: where it comes from, how it is split, and the windows that are drawn from it."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from transformer_kernels.nn.options import check_positive
from transformer_kernels.training.data.dataset import Batch, digest_of
from transformer_kernels.training.data.standard_library import standard_library_text
from transformer_kernels.training.data.windows import draw_windows, even_windows

HELD_OUT = 0.1
"""The share of a text, its tail, that is kept for validation."""


@dataclass(frozen=True)
class Corpus:
    """A text of bytes, split in two."""

    name: str
    """For people"""
    source: str | None
    """The absolute path of the file it came from, if it did"""
    train: Tensor
    """uint8, (bytes,)"""
    validation: Tensor
    """uint8, (bytes,): the tail of the text"""
    digest: str
    """SHA-256 of the whole text, in hexadecimal"""

    def check_length(self, context: int) -> None:
        """ValueError unless each part holds a window of `context` bytes and the byte after it."""
        for part, text in (("training", self.train), ("validation", self.validation)):
            if len(text) <= context:
                raise ValueError(
                    f"{self.name} is too short: a context of {context} needs {context + 1} bytes "
                    f"in each part, and the {part} part has {len(text)}"
                )


@dataclass(frozen=True)
class ByteWindows:
    """A dataset of the windows of a corpus, {"tokens": (B, context + 1)}: a token is a byte.

    Each byte is there to be predicted from those before it. ValueError where a part of the corpus
    is shorter than a window.
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
        """The windows of `draw_batch`, and the same random numbers."""
        return {
            "tokens": draw_windows(
                self.corpus.train, count=count, size=self.context + 1, generator=generator
            )
        }

    def held_out(self, count: int) -> Batch:
        """The windows of `even_batch`."""
        return {"tokens": even_windows(self.corpus.validation, count=count, size=self.context + 1)}


def corpus_from_bytes(text: bytes, name: str, *, source: str | None = None) -> Corpus:
    """Splits `text`: the last tenth is held out."""
    values = tensor_of(text)
    cut = len(text) - int(len(text) * HELD_OUT)
    return Corpus(name, source, values[:cut], values[cut:], hashlib.sha256(text).hexdigest())


def load_corpus(path: Path | str | None = None) -> Corpus:
    """The bytes of any file as they are, enwik8 for one, or else of the standard library (see
    `standard_library_text`).

    OSError where they cannot be read, ValueError where there are none.
    """
    if path is None:
        return corpus_from_bytes(standard_library_text(), "the Python standard library")
    path = Path(path)
    text = path.read_bytes()
    if not text:
        raise ValueError(f"{path} is empty: a text to train on was expected")
    return corpus_from_bytes(text, str(path), source=str(path.resolve()))


def tensor_of(text: bytes) -> Tensor:
    """The bytes as uint8, (bytes,)."""
    if not text:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def bytes_of(text: Tensor) -> bytes:
    """The bytes that a contiguous tensor (bytes,) of uint8 on the CPU holds."""
    return ctypes.string_at(text.data_ptr(), len(text))


def draw_batch(
    text: Tensor, *, batch: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`batch` windows at random: (inputs, targets), each (batch, context) int64.

    The target of a byte is the byte after it.
    """
    windows = draw_windows(text, count=batch, size=context + 1, generator=generator)
    return windows[:, :-1], windows[:, 1:]


def even_batch(text: Tensor, *, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Up to `batch` windows spread evenly over the text, the same at every call."""
    windows = even_windows(text, count=batch, size=context + 1)
    return windows[:, :-1], windows[:, 1:]
