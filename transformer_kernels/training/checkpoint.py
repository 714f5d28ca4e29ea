"""Checkpoints: written atomically, and read without executing code from the file."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from transformer_kernels.training.output_files import replacing

_FORMAT_NAME = "transformer_kernels checkpoint, version "
FORMAT = f"{_FORMAT_NAME}2"
"""Version 1 was written by 0.1: its configs and weights have other names."""

_UNREADABLE = (
    *(pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(EOFError, ArithmeticError, AssertionError, ImportError, MemoryError, struct.error),
)
"""Exceptions that zipfile and torch.load raise for invalid content. torch.load checks neither the
arguments nor the stack of a pickled instruction."""


class CheckpointError(ValueError):
    """A file that is damaged, is not a checkpoint of this package, or does not match the run.

    The text is one line that names the entry which is absent or invalid.
    """


def save_checkpoint(state: dict[str, Any], path: Path, *, kind: str) -> None:
    """Writes a checkpoint atomically: a crash leaves the old file or the new one, never a part.

    Args:
        state: tensors, numbers, strings and containers of them.
        path: output file; an existing file is replaced once the new one is on disk.
        kind: kind of task, such as "generator"; checked by `load_checkpoint`.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as file:
        output = _Output(file)
        torch.save({"format": FORMAT, "kind": kind} | state, cast(BinaryIO, output))
        if output.error is not None:
            raise output.error


class _Output:
    """A file whose first error is kept: torch.save turns errors into a RuntimeError without it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Does nothing: `replacing` flushes the file."""


def load_checkpoint(path: Path | str, *, kind: str | Sequence[str] = ()) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU.

    Executes nothing from the file: only tensors and plain containers are accepted.

    Args:
        path: file written by `save_checkpoint`.
        kind: accepted kind or kinds of task; empty accepts all.

    Returns:
        the state passed to `save_checkpoint`, and the keys "format" and "kind".

    Raises:
        OSError: the file cannot be read.
        CheckpointError: the file is not a checkpoint of an accepted kind, or it is damaged.
    """
    with Path(path).open("rb") as file:
        if not _is_whole(file):
            raise CheckpointError(f"{path} is not a checkpoint, or it is damaged")
        file.seek(0)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            raise CheckpointError(f"{path} is not a checkpoint of transformer_kernels") from error
    found = state.get("format") if isinstance(state, dict) else None
    if isinstance(found, str) and found.startswith(_FORMAT_NAME) and found != FORMAT:
        raise CheckpointError(f"{path} is a {found}; this version reads {FORMAT!r}")
    if not isinstance(state, dict) or found != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of transformer_kernels")
    kinds = [kind] if isinstance(kind, str) else kind
    if kinds and state.get("kind") not in kinds:
        wanted = " or ".join(kinds)
        raise CheckpointError(f"{path} is a checkpoint of a {state.get('kind')}, not of a {wanted}")
    return state


def _is_whole(file: BinaryIO) -> bool:
    """True if the archive's sizes and checksums match, which torch.load does not check.

    Entries that overlap would need more memory than the file has bytes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            stored = all(
                entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
                for entry in entries
            )
            whole = sum(entry.file_size for entry in entries) <= os.fstat(file.fileno()).st_size
            return stored and whole and archive.testzip() is None
    except (zipfile.BadZipFile, OSError, *_UNREADABLE):
        return False
