"""Checkpoints: written atomically, and read without executing code from the file.

A checkpoint is one file, or, where parameters are divided over processes, that file without the
large tensors, and a folder beside it with those (`ShardFiles`).
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from ..common.argument_checks import shown
from .checkpoint_error import CheckpointError as CheckpointError
from .distributed import DistributedContext
from .output_files import replacing
from .shard_files import ShardFiles, remove_shards, unread
from .sharding import from_own_shard, own_shard

_FORMAT_NAME = "transformer_kernels checkpoint, version "
FORMAT = f"{_FORMAT_NAME}2"
"""Version 1 was written by 0.1: its configs and weights have other names."""

_UNREADABLE = (
    *(pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(EOFError, ArithmeticError, AssertionError, ImportError, MemoryError, struct.error),
)
"""Exceptions that zipfile and torch.load raise for invalid content. torch.load checks neither the
arguments nor the stack of a pickled instruction."""


_NAME = re.compile(
    r"model\.(?P<weight>.+)|optimizer\.state\.(?P<number>\d{1,18})\.(?P<key>\w+)", re.ASCII
)
"""Names of tensors in the folder: those of their places in the state."""


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


def save_sharded_checkpoint(
    state: dict[str, Any], path: Path, *, kind: str, distributed: DistributedContext
) -> None:
    """Writes a checkpoint whose tensors all ranks have parts of. A collective.

    Weights and moments are in the folder checkpoint-<step> beside the file, which is replaced once
    the folder is on disk. Folders of earlier checkpoints are removed after that: a crash leaves the
    old file and its folder or the new ones.

    Args:
        state: as returned by `Trainer.state`.
        path: output file.
        kind: kind of task.
        distributed: the ranks.

    Raises:
        OSError: a file cannot be written.
    """
    folder = path.with_name(f"checkpoint-{state['steps_done']}")
    optimizer: dict[str, Any] = state["optimizer"]
    tensors = {f"model.{name}": x for name, x in state["model"].items()}
    rest: dict[int, dict[str, Tensor]] = {}
    for number, values in optimizer["state"].items():
        rest[number] = {key: x for key, x in values.items() if x.dim() == 0}
        for key in values.keys() - rest[number].keys():
            tensors[f"optimizer.state.{number}.{key}"] = values[key]
    shards = ShardFiles.write(folder, tensors, distributed)
    if distributed.is_main:
        without = {"model": {}, "optimizer": optimizer | {"state": rest}, "shards": shards.entry()}
        save_checkpoint(state | without, path, kind=kind)
        remove_shards(path.parent, keep=folder.name)


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


def load_checkpoint(
    path: Path | str, *, kind: str | Sequence[str] = (), described: bool = False
) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU.

    Executes nothing from the file: only tensors and plain containers are accepted.

    Args:
        path: file written by `save_checkpoint` or `save_sharded_checkpoint`.
        kind: accepted kind or kinds of task; empty accepts all.
        described: leaves the tensors of a sharded checkpoint in their folder, for `shards_of`. The
            state then has meta tensors in their places.

    Returns:
        the state passed to `save_checkpoint`, and the keys "format" and "kind".

    Raises:
        OSError: the file cannot be read.
        CheckpointError: the file is not a checkpoint of an accepted kind, or it is damaged.
    """
    state = _load_file(path, kind)
    try:
        shards = shards_of(state, path)
        if shards is not None:
            state["model"] = {}
            place_tensors(state, shards.described() if described else shards.read())
            if not described:
                del state["shards"]
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return state


def shards_of(state: dict[str, Any], path: Path | str) -> ShardFiles | None:
    """The files that a checkpoint's tensors are in, if not in its own file.

    Raises CheckpointError if the state does not describe such files.
    """
    return ShardFiles.of(state["shards"], Path(path).parent) if "shards" in state else None


def read_own_shards(
    state: dict[str, Any],
    shards: ShardFiles,
    *,
    weights: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
    distributed: DistributedContext,
) -> None:
    """Replaces the meta tensors of a state by this rank's shards. A collective.

    Args:
        state: the state that `load_checkpoint` described, changed in-place.
        shards: its files.
        weights: tensors of the model by name, divided over the ranks.
        parameters: parameters in the optimizer's order, divided over the ranks.
        distributed: the ranks.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor has another shape or dtype than
            that of the model.
    """
    shards.check(distributed)
    like = {f"model.{name}": x for name, x in weights.items()}
    for number, parameter in enumerate(parameters):
        for key in ("exp_avg", "exp_avg_sq"):
            like[f"optimizer.state.{number}.{key}"] = parameter
    tensors = {}
    for name, found in shards.described().items():
        if name not in like:
            continue  # check_state refuses it
        model = like[name]
        if found.shape != model.shape or found.dtype != model.dtype:
            raise CheckpointError(
                f"{name} must have shape {tuple(model.shape)} and dtype {model.dtype}, "
                f"got {tuple(found.shape)} and {found.dtype}"
            )
        own = own_shard(model).detach()
        tensors[name] = from_own_shard(unread(torch.empty_like(own)), model)
    shards.read_into(tensors)
    place_tensors(state, {name: own_shard(x).cpu() for name, x in tensors.items()})


def place_tensors(state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Puts the tensors of a folder, by their names there, into the state of their checkpoint."""
    for name, x in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(f"shards have the unknown tensor {shown(name)}")
        if (key := match["weight"]) is not None:
            place = state["model"]
        else:
            key, place = match["key"], state
            for parent in ("optimizer", "state", int(match["number"])):
                place = place.get(parent) if type(place) is dict else None
            if type(place) is not dict:
                raise CheckpointError(f"it has no place for {name}")
        place[key] = x


def _load_file(path: Path | str, kind: str | Sequence[str]) -> dict[str, Any]:
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
