"""Checkpoints: folders that are written as a whole, and read without executing code from them.

    checkpoint-<steps>/
        config.json          settings, data and progress: `Metadata`
        curve.csv            learning curve
        shard-*.safetensors  weights, moments and random states
        checksums.json       CRC-32 of each file

torch.distributed.checkpoint writes the tensors: one file, or one of each process that parameters
are divided over. Any number of processes reads them. Its own format has a pickle, which could
execute code; safetensors files have none.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.argument_checks import shown
from ..common.optional_deps import require
from .config import TrainConfig, from_fields
from .curves import CurveRow, naming, read_curve, rewrite_curve
from .distributed import SINGLE_PROCESS, DistributedContext, own_shard
from .task import Extra
from .tasks import config_from_dict

FORMAT = "transformer_kernels checkpoint, version 3"
CONFIG, CURVE, CHECKSUMS = "config.json", "curve.csv", "checksums.json"

_FOLDER = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
_LARGEST_BUFFERS = 1 << 30
"""Bytes of tensors that a model computes from its config: a checkpoint has none of them."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, is not of this package, or does not match the run.

    The text is one line that names the folder, and the file or entry which is absent or invalid.
    """


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Everything in a checkpoint but its tensors and the curve."""

    config: TrainConfig
    data: str
    """Name of the dataset"""
    source: str | None
    """Path of the dataset"""
    digest: str
    """Digest of the dataset"""
    extra: Extra
    steps_done: int
    updates: int
    """Steps that have changed the weights: float16 skips those whose gradients overflow"""
    scaler: tuple[float, int] | None
    """Loss scale (float16) and steps since it last changed"""
    processes: int
    context_parallel: int

    def __post_init__(self) -> None:
        steps, half = self.steps_done, self.config.precision == "float16"
        if not 0 <= steps <= self.config.steps:
            raise ValueError(f"steps_done must be between 0 and {self.config.steps}, got {steps}")
        if not (0 if half else steps) <= self.updates <= steps:
            raise ValueError(f"updates do not match steps_done, {steps}, got {self.updates}")
        scale, tracker = self.scaler or (1.0, 0)
        if half == (self.scaler is None) or not 0 < scale < math.inf or tracker < 0:
            raise ValueError(f"scaler does not match {self.config.precision}, got {self.scaler}")
        if min(self.processes, self.context_parallel) < 1 or self.processes % self.context_parallel:
            raise ValueError(
                f"context_parallel must divide the number of processes, {self.processes}, got "
                f"{self.context_parallel}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"format": FORMAT} | asdict(self) | {"config": self.config.to_dict()}

    @staticmethod
    def from_dict(values: Any) -> Metadata:
        """Inverse of `to_dict`; ValueError if it is not one."""
        found = values.pop("format", None) if type(values) is dict else None
        if found != FORMAT:
            raise ValueError(f"{CONFIG} must have the format {FORMAT!r}, got {shown(found)}")
        for name in ("config", "extra"):
            if type(values.get(name)) is not dict:
                raise ValueError(f"{CONFIG} lacks the dict {name!r}")
        config = config_from_dict(values["config"])
        return from_fields(Metadata, values, CONFIG, config=config, extra=values["extra"])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are whole and whose weights have the shapes of its model.

    Attributes:
        folder: its folder.
        metadata: its settings and progress.
        tensors: shapes and dtypes of its tensors, as meta tensors.
    """

    folder: Path
    metadata: Metadata
    tensors: Mapping[str, Tensor]

    @staticmethod
    def open(path: Path | str, kinds: str | Sequence[str] = ()) -> Checkpoint:
        """Checks the files of a checkpoint. Allocates no tensors, whatever its config says.

        Args:
            path: the folder of a checkpoint, or of a run, for its newest one.
            kinds: accepted kind or kinds of task (`Task.kind`); empty accepts all.

        Raises:
            OSError: a file cannot be read.
            CheckpointError: it is not a checkpoint of an accepted kind, or it is damaged.
        """
        folder = find_checkpoint(path)
        with _as_checkpoint_error(folder):
            _check_files(folder)
            metadata = Metadata.from_dict(json.loads((folder / CONFIG).read_bytes()))
            kind, kinds = metadata.config.task.kind, [kinds] if isinstance(kinds, str) else kinds
            if kinds and kind not in kinds:
                wanted = " or ".join(kinds)
                raise ValueError(f"it is a checkpoint of a {kind}, not of a {wanted}")
            checkpoint = Checkpoint(folder, metadata, _described(folder))
            checkpoint._check_model()
        return checkpoint

    def _check_model(self) -> None:
        task = self.metadata.config.task
        task.check_extra(self.metadata.extra)
        layers = getattr(task.model, "layers", 1)
        if layers > len(self.tensors):  # building them, even without memory, takes time
            raise ValueError(f"it has {len(self.tensors)} tensors, but the config {layers} layers")
        with torch.device("meta"):
            model = task.build("eager")
        self._check_shapes(model.state_dict(prefix="model."), "model.")
        if sum(x.nbytes for x in model.buffers()) > _LARGEST_BUFFERS:
            raise ValueError(f"the config is too large: {task.model}")

    def _check_shapes(self, expected: Mapping[str, Tensor], prefix: str) -> None:
        found = {name: x for name, x in self.tensors.items() if name.startswith(prefix)}
        for name in (*expected, *found):
            if name not in found:
                raise ValueError(f"it lacks the tensor {name}")
            if name not in expected:
                raise ValueError(f"it has the unknown tensor {shown(name)}")
            wanted, given = ((tuple(x.shape), x.dtype) for x in (expected[name], found[name]))
            if given != wanted:
                raise ValueError(
                    f"{name} must have shape {wanted[0]} and dtype {wanted[1]}, "
                    f"got {given[0]} and {given[1]}"
                )

    def read(self, expected: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """Reads the tensors whose names have a prefix. Not a collective.

        Args:
            expected: tensors of the same names, shapes and dtypes. Those that are divided over
                processes (DTensors) are divided alike in the result, and the others on the CPU.
            prefix: first part of the names.

        Raises:
            CheckpointError: there are other tensors, or this process's part of one is not finite.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with _as_checkpoint_error(self.folder), _plain_torch_errors():
            self._check_shapes(expected, prefix)
            tensors = {name: _unread(x) for name, x in expected.items()}
            reader = HuggingFaceStorageReader(str(self.folder))
            load(dict(tensors), storage_reader=reader, no_dist=True)
            for name, x in tensors.items():
                if x.is_floating_point() and not bool(own_shard(x).isfinite().all()):
                    raise ValueError(f"{name} must be finite, got NaN or infinity")
        return tensors

    def rows(self) -> list[CurveRow]:
        """Reads the learning curve; CheckpointError unless it is that of `steps_done` steps."""
        with _as_checkpoint_error(self.folder):
            rows, steps = read_curve(self.folder / CURVE), self.metadata.steps_done
            if [row.step for row in rows] != list(range(1, steps + 1)):
                raise ValueError(f"{CURVE} must count the steps from 1 to {steps}")
            for row in rows:
                numbers = (row.train_loss, row.seconds, row.tokens_per_s)
                if None in numbers or not all(map(math.isfinite, numbers)) or row.seconds <= 0:
                    raise ValueError(f"{CURVE} must have finite numbers, got {shown(row)}")
        return rows


def find_checkpoint(path: Path | str) -> Path:
    """The folder of a checkpoint: `path`, or the newest in the folder `path` of a run.

    Raises OSError if the path does not exist, and CheckpointError if it has no checkpoint.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if (path / CHECKSUMS).is_file():
        return path
    found = max(_checkpoints(path), key=lambda one: int(one.name.split("-")[1]), default=None)
    if found is None:
        raise CheckpointError(
            f"{path} is not the folder of a checkpoint or a run; a checkpoint.pt of an earlier "
            "version cannot be read: train again, or use the version that wrote it"
        )
    return found


def write_checkpoint(
    parent: Path,
    metadata: Metadata,
    tensors: Mapping[str, Tensor],
    rows: Iterable[CurveRow],
    distributed: DistributedContext = SINGLE_PROCESS,
) -> Path:
    """Writes checkpoint-<steps> to a folder, and removes the other checkpoints in it.

    A crash leaves the others or the new one, never a part of it under its name. What it leaves
    under other names is removed by `remove_leftovers`.

    Args:
        parent: folder of the run, which this process has locked.
        metadata: settings and progress.
        tensors: plain tensors, or those of all ranks, which may be divided over them.
        rows: learning curve.
        distributed: the ranks, if parameters are divided over them; it is a collective then.

    Returns the folder. Raises OSError, which names it, if a file cannot be written.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = parent / f"checkpoint-{metadata.steps_done}"
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        with distributed.on_all_ranks(OSError), naming(folder):
            if distributed.is_main:
                temporary.mkdir()
        with naming(folder), _plain_torch_errors():
            writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
            save(dict(tensors), storage_writer=writer, no_dist=not distributed.sharded)
        with distributed.on_all_ranks(OSError), naming(folder):
            if distributed.is_main:
                (temporary / CONFIG).write_text(json.dumps(metadata.to_dict(), indent=1))
                rewrite_curve(temporary / CURVE, rows)
                checksums = {path.name: _checksum(path) for path in sorted(temporary.iterdir())}
                (temporary / CHECKSUMS).write_text(json.dumps(checksums, indent=1))
                for path in temporary.iterdir():
                    with path.open("rb+") as file:
                        os.fsync(file.fileno())
                others = _checkpoints(parent)
                if folder in others:
                    _remove(folder)
                temporary.replace(folder)
                for other in set(others) - {folder}:
                    _remove(other)
    finally:
        if distributed.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def remove_leftovers(parent: Path) -> None:
    """Removes what a killed process has left of checkpoints in a folder, which must be locked."""
    for path in parent.glob(".checkpoint-*"):
        shutil.rmtree(path)


def _checkpoints(parent: Path) -> list[Path]:
    """The checkpoints in the folder of a run. Other programs' folders may have like names."""
    named = [path for path in parent.glob("checkpoint-*") if _FOLDER.fullmatch(path.name)]
    return [path for path in named if (path / CHECKSUMS).is_file()]


def _remove(folder: Path) -> None:
    """Removes a checkpoint; a part of it would not be one."""
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.old")))


def _check_files(folder: Path) -> None:
    """Raises ValueError unless a folder has the files of its list, unchanged."""
    checksums = json.loads((folder / CHECKSUMS).read_bytes())
    if type(checksums) is not dict or not checksums.keys() >= {CONFIG, CURVE}:
        raise ValueError(f"{CHECKSUMS} must have the files of a checkpoint, got {shown(checksums)}")
    files = {path.name for path in folder.iterdir() if path.is_file()}
    for name in sorted(files - checksums.keys()):
        if name.endswith(".safetensors"):
            raise ValueError(f"it has the unknown file {name!r}")
    for name, checksum in checksums.items():
        if name not in files:
            raise ValueError(f"it lacks the file {name!r}")
        if _checksum(folder / name) != checksum:
            raise ValueError(f"{name} is damaged")


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _described(folder: Path) -> dict[str, Tensor]:
    """Shapes and dtypes of the tensors in a folder, which together are no larger than its files."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with _plain_torch_errors():
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        found: Mapping[str, Any] = metadata.state_dict_metadata
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
        for name, one in found.items()
    }
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if sum(x.nbytes for x in tensors.values()) > size:
        raise ValueError("its tensors are larger than its files")
    return tensors


def _unread(like: Tensor) -> Tensor:
    """A new tensor with NaN, which stays where no file has an element."""
    divided = own_shard(like) is not like
    x = torch.zeros_like(like) if divided else torch.zeros(like.shape, dtype=like.dtype)
    return x.fill_(math.nan) if x.is_floating_point() else x


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Converts errors of invalid files to a `CheckpointError` that names the folder."""
    try:
        yield
    except ValueError as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: {text}") from None
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: it is damaged: {shown(str(error))}") from error


@contextmanager
def _plain_torch_errors() -> Iterator[None]:
    """Raises the causes of errors of torch.distributed.checkpoint and safetensors."""
    require("safetensors", extra="train")
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from error
        except SafetensorError as error:
            raise ValueError(f"it is damaged: {error}") from error
