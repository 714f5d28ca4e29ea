"""Files of a run: replaced as a whole, in a folder that one process locks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
_TEMPORARY = re.compile(r"\..+\.\d+(\.tmp)?")
"""Names of the files that `replacing` writes to. 0.1 omitted the suffix."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of file systems without locks."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError: those of `write` have none, for example if the disk is full."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` at the end of the context.

    Until then the content is in a temporary file beside it, which an exception removes. A process
    that is killed leaves it behind for `remove_temporary_files`.

    Raises:
        OSError: the file cannot be written. It names `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_temporary_files(folder: Path, *names: str) -> None:
    """Removes what killed processes left of the files `names`. The folder must be locked."""
    for path in folder.iterdir():
        known = path.name.startswith(tuple(f".{name}." for name in names))
        if known and _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


class FolderLock:
    """Lock of a folder, held by one process at most. It ends with the process, however that ends.

    The lock is on the file `LOCK` in the folder, which exists only while a process holds the lock
    or after that process was killed. Windows and file systems without locks have no protection.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._release: weakref.finalize[[int, Path], FolderLock] | None = None

    def acquire(self) -> None:
        """Locks the folder, unless this object holds the lock already.

        Raises:
            BlockingIOError: another process, or another object of this one, holds the lock.
            OSError: the folder cannot be written.
        """
        if sys.platform == "win32" or (self._release is not None and self._release.alive):
            return
        while not self._try():
            pass  # another process released the lock in between, and removed its file

    def _try(self) -> bool:
        path = self.folder / LOCK
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                reason = "another process is training in this folder"
                raise BlockingIOError(errno.EWOULDBLOCK, reason, str(self.folder)) from None
        if not _is_at(descriptor, path):
            os.close(descriptor)
            return False
        self._release = weakref.finalize(self, _release, descriptor, path)
        return True

    def release(self) -> None:
        """Unlocks the folder, if this object holds the lock."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _release(descriptor: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(descriptor)
