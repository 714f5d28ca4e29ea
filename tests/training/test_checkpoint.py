"""Tests of checkpoints: atomic writes, and rejection of damaged and foreign files."""

from __future__ import annotations

import os
import random
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from transformer_kernels.training import CheckpointError, load_checkpoint, save_checkpoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(
        {"step": 3, "weights": {"w": torch.arange(100.0)}, "none": None}, path, kind="test"
    )
    return path


def test_round_trip(path: Path) -> None:
    state = load_checkpoint(path, kind="test")
    assert state["step"] == 3
    assert state["none"] is None
    assert torch.equal(state["weights"]["w"], torch.arange(100.0))


def test_failed_save_keeps_the_old_file_and_no_temporary_file(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        save_checkpoint({"not storable": lambda: None}, path, kind="test")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_save_replaces_an_existing_file(path: Path) -> None:
    save_checkpoint({"step": 4}, path, kind="test")
    assert load_checkpoint(path, kind="test")["step"] == 4
    assert list(path.parent.iterdir()) == [path]


def test_unreadable_path_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "nothing.pt", kind="test")
    with pytest.raises(IsADirectoryError):
        load_checkpoint(tmp_path, kind="test")


@pytest.mark.parametrize("content", [b"", b"some text", b"PK\x03\x04 nearly"])
def test_file_that_is_not_an_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"notes\.pt is not a checkpoint, or it is damaged"):
        load_checkpoint(path, kind="test")


def test_truncated_checkpoint_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for length in range(0, len(content), 50):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(path, kind="test")


def test_flipped_bits_are_detected_or_harmless(path: Path) -> None:
    content = path.read_bytes()
    weights = torch.arange(100.0)
    detected = 0
    for position in random.Random(0).sample(range(len(content)), 600):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            state = load_checkpoint(path, kind="test")
        except CheckpointError:
            detected += 1
        else:
            assert torch.equal(state["weights"]["w"], weights)
    assert detected > 200


def test_checkpoint_of_another_version_names_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"format": "transformer_kernels checkpoint, version 1"}, path)
    with pytest.raises(CheckpointError, match=r"old\.pt is a .*, version 1; .* reads .*version 2'"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "state", [torch.zeros(3), {"model": {"w": torch.zeros(3)}}, {"format": "another, version 1"}]
)
def test_foreign_checkpoint_is_refused(tmp_path: Path, state: object) -> None:
    path = tmp_path / "other.pt"
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of transformer_kernels"):
        load_checkpoint(path, kind="test")


def test_checkpoint_of_another_kind_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a checkpoint of a test, not of a classifier"):
        load_checkpoint(path, kind="classifier")


@pytest.mark.parametrize(
    "code",
    [b"R.", b"K\x01K\x02a.", b"h\x05.", b"K\x01Q.", b"]\x940h\x00h\x00e.", b"(ttttt.", b"\x8c"],
)
def test_invalid_pickle_is_refused(path: Path, code: bytes) -> None:
    """torch.load raises errors of many types."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, b"\x80\x02" + code if name.endswith("data.pkl") else content)
    with pytest.raises(CheckpointError, match="is not a checkpoint of transformer_kernels"):
        load_checkpoint(path)


def test_archive_whose_entries_overlap_is_refused(path: Path) -> None:
    """Its entries together are larger than the file."""
    with zipfile.ZipFile(path, "a") as archive:
        (largest,) = (entry for entry in archive.filelist if entry.filename.endswith("data/0"))
        archive.filelist += [largest] * 50
        archive.writestr("another", b"")
    with pytest.raises(CheckpointError, match="is not a checkpoint, or it is damaged"):
        load_checkpoint(path)


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Function that sets the largest file size of this process, in bytes, for one test."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_limit_of_file_sizes_keeps_the_old_file_and_no_temporary_file(
    path: Path, largest_file: Callable[[int], None]
) -> None:
    before = path.read_bytes()
    largest_file(1 << 20)
    with pytest.raises(OSError, match="File too large") as caught:
        save_checkpoint({"w": torch.zeros(1 << 19)}, path, kind="test")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("size", [1, 1 << 19])
def test_full_disk_keeps_the_old_file_and_no_temporary_file(path: Path, size: int) -> None:
    """The error comes from the last flush of a small file, and from a write of a large one."""
    before = path.read_bytes()
    path.with_name(f".{path.name}.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_checkpoint({"w": torch.zeros(size)}, path, kind="test")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


class Payload:
    """Object whose pickle calls `Path.touch` when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    path = tmp_path / "evil.pt"
    torch.save({"format": Payload(touched)}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of transformer_kernels"):
        load_checkpoint(path, kind="test")
    assert not touched.exists()
