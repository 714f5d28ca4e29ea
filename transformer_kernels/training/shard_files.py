"""Tensors of a sharded checkpoint: safetensors files in a folder, written by all processes.

torch.distributed.checkpoint writes and reads them. Its own format has a pickle, which could execute
code; safetensors files have none.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.argument_checks import shown
from ..common.optional_deps import require
from .checkpoint_error import CheckpointError
from .distributed import SINGLE_PROCESS, DistributedContext

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

_FOLDER = re.compile(r"checkpoint-\d{1,18}", re.ASCII)
_FILE = re.compile(r"shard-\d{5,9}-model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
_BLOCK = 1 << 22
"""Bytes that are read at a time for a checksum."""

_INVALID = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions of torch's reader for files whose header is valid JSON but not one of its own."""


@dataclass(frozen=True)
class ShardFiles:
    """Files of one checkpoint.

    Attributes:
        folder: folder of the files; it has no other safetensors files.
        files: size in bytes and CRC-32 of each file, by name.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(entry: Any, parent: Path) -> ShardFiles:
        """The files that `entry` describes, in a folder of `parent`.

        Raises:
            CheckpointError: it is not an entry as made by `ShardFiles.entry`.
        """
        if type(entry) is not dict or set(entry) != {"folder", "files"}:
            raise CheckpointError(f"shards must have the keys folder and files, got {shown(entry)}")
        folder, files = entry["folder"], entry["files"]
        if type(folder) is not str or not _FOLDER.fullmatch(folder):
            raise CheckpointError(f"shards.folder must be checkpoint-<step>, got {shown(folder)}")
        if type(files) is not dict or not files:
            raise CheckpointError(f"shards.files must be a dict of files, got {shown(files)}")
        for name, numbers in files.items():
            if type(name) is not str or not _FILE.fullmatch(name):
                raise CheckpointError(f"shards.files has the invalid name {shown(name)}")
            if type(numbers) is not tuple or [type(x) for x in numbers] != [int, int]:
                raise CheckpointError(
                    f"shards.files.{name} must be a size and a checksum, got {shown(numbers)}"
                )
        return ShardFiles(parent / folder, files)

    def entry(self) -> dict[str, Any]:
        """Description of the files for the checkpoint, of plain values."""
        return {"folder": self.folder.name, "files": dict(self.files)}

    @staticmethod
    def write(
        folder: Path, tensors: Mapping[str, Tensor], distributed: DistributedContext
    ) -> ShardFiles:
        """Writes tensors to a new folder. A collective: each rank writes its shards.

        Returns when the files of all ranks are on disk.

        Raises:
            OSError: the folder exists, or a file cannot be written.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with distributed.on_all_ranks(OSError):
            if distributed.is_main:
                remove_shards(folder.parent, folder.name)
                folder.mkdir()
        with _plain_errors(folder):
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save(dict(tensors), storage_writer=writer)
        own = folder.glob(f"shard-{distributed.rank + 1:05d}-*.safetensors")
        mine = {path.name: _size_and_checksum(path) for path in own}
        files = {name: x for part in distributed.all_gather(mine) for name, x in part.items()}
        return ShardFiles(folder, files)

    def check(self, distributed: DistributedContext = SINGLE_PROCESS) -> None:
        """Compares sizes and checksums of the files; the ranks divide them. A collective.

        Raises:
            CheckpointError: a file is missing, damaged or unknown.
        """
        with distributed.on_all_ranks(CheckpointError):
            self._check_sizes()
            for name in sorted(self.files)[distributed.rank :: distributed.world_size]:
                if _size_and_checksum(self.folder / name) != self.files[name]:
                    raise CheckpointError(f"{self.folder.name}/{name} is damaged")

    def _check_sizes(self) -> None:
        """Raises CheckpointError unless the folder has exactly these files, of these sizes."""
        found = {path.name: path for path in self.folder.glob("*.safetensors")}
        for name in sorted(found.keys() - self.files.keys()):
            raise CheckpointError(f"{self.folder.name} has the unknown file {shown(name)}")
        for name, (size, _) in sorted(self.files.items()):
            if name not in found:
                raise CheckpointError(f"{self.folder.name} lacks the file {name}")
            if found[name].stat().st_size != size:
                raise CheckpointError(f"{self.folder.name}/{name} is damaged")

    def described(self) -> dict[str, Tensor]:
        """Shapes and dtypes of the tensors, by name, as meta tensors.

        Raises:
            CheckpointError: a file is missing, or not one of torch.distributed.checkpoint.
        """
        self._check_sizes()
        found = {}
        with _plain_errors(self.folder):
            metadata = self._reader().read_metadata()
            for name, one in metadata.state_dict_metadata.items():
                size = tuple(one.size)
                if not _are_pieces(one.chunks, size):
                    raise CheckpointError(f"{name} must have shards that make up the shape {size}")
                found[name] = torch.empty(size, dtype=one.properties.dtype, device="meta")
        return found

    def read(self) -> dict[str, Tensor]:
        """The undivided tensors, on the CPU; in any process, without a process group.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self.check()
        tensors = {
            name: unread(torch.empty_like(x, device="cpu")) for name, x in self.described().items()
        }
        self.read_into(tensors, alone=True)
        return tensors

    def read_into(self, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
        """Reads tensors in-place, each of the shape and dtype in `described`.

        Elements that no file has stay as they are. Divided tensors, of any number of processes, get
        this rank's shards. A collective, unless `alone`.

        Raises:
            CheckpointError: a file is damaged.
        """
        from torch.distributed.checkpoint.state_dict_loader import load

        with _plain_errors(self.folder), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(tensors), storage_reader=self._reader(), no_dist=alone)

    def _reader(self) -> Any:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        return HuggingFaceStorageReader(str(self.folder))


def _are_pieces(chunks: Sequence[ChunkStorageMetadata], size: tuple[int, ...]) -> bool:
    """True if chunks are within a tensor of this size and have as many elements.

    The tensor then fits in memory if the files do. If chunks overlap, others are missing.
    """
    within = all(
        len(chunk.offsets) == len(size)
        and all(
            at >= 0 and at + part <= whole
            for at, part, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        for chunk in chunks
    )
    return within and sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(size)


def unread(x: Tensor) -> Tensor:
    """Fills a floating-point tensor with NaN, which stays where a file lacks elements."""
    return x.fill_(math.nan) if x.is_floating_point() else x.zero_()


def remove_shards(parent: Path, *names: str, keep: str | None = None) -> None:
    """Removes folders that `ShardFiles.write` made in `parent`: those named, or all but `keep`.

    A folder with any other file in it stays.
    """
    folders = [parent / name for name in names] if names else list(parent.glob("checkpoint-*"))
    for folder in folders:
        if folder.name == keep or not _FOLDER.fullmatch(folder.name) or not folder.is_dir():
            continue
        files = list(folder.iterdir())
        if all(_FILE.fullmatch(file.name) for file in files):
            for file in files:
                file.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


def shard_folders(parent: Path) -> list[Path]:
    """Folders whose names are those of `ShardFiles.write`, whatever is in them."""
    return sorted(path for path in parent.glob("checkpoint-*") if _FOLDER.fullmatch(path.name))


def _size_and_checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


@contextlib.contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Converts errors of torch.distributed.checkpoint to OSError and CheckpointError."""
    require("safetensors", extra="train")
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError):
                reason = cause.strerror or str(cause)
                raise OSError(cause.errno, reason, str(folder)) from error
        raise CheckpointError(f"{folder.name} is damaged: {shown(str(causes[0]))}") from error
    except (SafetensorError, *_INVALID) as error:
        raise CheckpointError(f"{folder.name} is damaged: {shown(str(error))}") from error
