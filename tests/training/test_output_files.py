"""Files of a run: atomic replacement, errors that name the file, and the lock of a folder."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_kernels.training.output_files import (
    LOCK,
    FolderLock,
    naming,
    remove_temporary_files,
    replacing,
)


def temporary(path: Path) -> Path:
    """The file that `replacing` writes to."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_keeps_the_old_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    temporary(path).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught, replacing(path) as file:
        file.write(b"new")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_without_a_file_gets_one(tmp_path: Path) -> None:
    with pytest.raises(PermissionError) as caught, naming(tmp_path):
        raise OSError(errno.EACCES, "Permission denied")
    assert caught.value.filename == str(tmp_path)


def test_only_temporary_files_of_the_named_files_are_removed(tmp_path: Path) -> None:
    kept = [".a.pt.tmp", ".b.pt.12.tmp", "a.pt", ".a.pt.backup", "a.pt.12.tmp"]
    for name in (*kept, ".a.pt.12.tmp", ".a.pt.12"):
        (tmp_path / name).touch()
    remove_temporary_files(tmp_path, "a.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_lock_is_held_by_one_object_at_most(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    first.acquire()
    with pytest.raises(BlockingIOError, match="another process is training in this folder"):
        second.acquire()
    first.release()
    first.release()
    with second, pytest.raises(BlockingIOError):
        first.acquire()
    assert list(tmp_path.iterdir()) == []


def test_lock_of_a_lost_object_is_released(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()
    del lock
    FolderLock(tmp_path).acquire()


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """Its file is still there. The module is loaded without its package, which imports torch."""
    import transformer_kernels.training.output_files as module

    assert module.__file__ is not None
    script = f"""
import importlib.util, os, pathlib, signal, sys
spec = importlib.util.spec_from_file_location("output_files", {module.__file__!r})
module = sys.modules["output_files"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
lock = module.FolderLock(pathlib.Path({str(tmp_path)!r}))
lock.acquire()
print("locked", flush=True)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(BlockingIOError):
            FolderLock(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with FolderLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
