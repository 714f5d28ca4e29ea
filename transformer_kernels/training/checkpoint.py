"""Checkpoints: written whole or not at all, and read without running code from the file."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

FORMAT = "transformer_kernels checkpoint, version 1"

_UNREADABLE = (pickle.UnpicklingError, RuntimeError, ValueError, EOFError)
"""What zipfile and torch.load raise on bytes that they cannot make sense of."""


class CheckpointError(ValueError):
    """A file that is not a checkpoint of ours, or is damaged, or does not fit."""


def save_checkpoint(state: dict[str, Any], path: Path, *, kind: str) -> None:
    """Writes `state` (tensors, numbers, strings and containers of them) to `path`.

    `kind` says what it is a checkpoint of ("generator"), for `load_checkpoint` to check.

    A file of that name is replaced in one go, once the new one is on disk: a crash leaves the old
    one or the new one, never a part.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, "kind": kind} | state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path | str, *, kind: str | Sequence[str] = ()) -> dict[str, Any]:
    """The state that `save_checkpoint` was given, with one of these kinds if any is named, on the
    CPU.

    OSError where the file cannot be read, CheckpointError where it is not such a checkpoint.
    Nothing in it is executed: only tensors and plain containers are accepted.
    """
    with Path(path).open("rb") as file:
        if not _is_whole(file):
            raise CheckpointError(f"{path} is not a checkpoint, or it is damaged")
        file.seek(0)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            raise CheckpointError(f"{path} is not a checkpoint of ours") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of ours")
    kinds = [kind] if isinstance(kind, str) else kind
    if kinds and state.get("kind") not in kinds:
        wanted = " or ".join(kinds)
        raise CheckpointError(f"{path} is a checkpoint of a {state.get('kind')}, not of a {wanted}")
    return state


def _is_whole(file: BinaryIO) -> bool:
    """Whether the archive's sizes and checksums are right: torch.load looks at neither."""
    try:
        with zipfile.ZipFile(file) as archive:
            stored = all(
                entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
                for entry in archive.infolist()
            )
            return stored and archive.testzip() is None
    except (zipfile.BadZipFile, OSError, *_UNREADABLE):
        return False
