"""Text as bytes: where it comes from, how it is split, and the windows that are drawn from it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.1
"""The share of a text, its tail, that is kept for validation."""

STANDARD_LIBRARY_BYTES = 8_000_000
"""The default corpus ends here; the whole of it has some 10 MB."""

_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "msilib", "pydoc_data"),  # tables
}


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


def corpus_from_bytes(text: bytes, name: str, *, source: str | None = None) -> Corpus:
    """Splits `text`: the last tenth is held out."""
    values = torch.tensor([], dtype=torch.uint8)
    if text:
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(text) - int(len(text) * HELD_OUT)
    return Corpus(name, source, values[:cut], values[cut:], hashlib.sha256(text).hexdigest())


def load_corpus(path: Path | str | None = None) -> Corpus:
    """The bytes of any file as they are, or else of the standard library (see below).

    OSError where they cannot be read.
    """
    if path is None:
        return corpus_from_bytes(standard_library_text(), "the Python standard library")
    path = Path(path)
    return corpus_from_bytes(path.read_bytes(), str(path), source=str(path.resolve()))


def standard_library_text(limit: int = STANDARD_LIBRARY_BYTES) -> bytes:
    """The first `limit` bytes of the standard library's own sources, in the order of their paths.

    Every Python installation carries them; tests, tables and installed packages are left out. The
    text depends on the Python version, and on nothing else. FileNotFoundError where there is none.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in _sources(root):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if not parts:
        raise FileNotFoundError(f"no Python sources under {root}: name a text file instead")
    return b"".join(parts)[:limit]


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _LEFT_OUT:
                yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def draw_batch(
    text: Tensor, *, batch: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`batch` windows at random: (inputs, targets), each (batch, context) int64.

    The target of a byte is the byte after it.
    """
    starts = torch.randint(len(text) - context, (batch,), generator=generator)
    return _windows(text, starts, context)


def even_batch(text: Tensor, *, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Up to `batch` windows spread evenly over the text, the same at every call."""
    last = len(text) - context - 1
    starts = torch.linspace(0, last, min(batch, last + 1), dtype=torch.float64).long()
    return _windows(text, starts, context)


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = text.unfold(0, context + 1, 1)[starts].long()
    return windows[:, :-1], windows[:, 1:]
