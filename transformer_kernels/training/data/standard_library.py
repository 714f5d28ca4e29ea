"""Text that every Python installation carries: the sources of the standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

STANDARD_LIBRARY_BYTES = 8_000_000
"""The default corpus ends here; the whole of it has some 10 MB."""

_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "msilib", "pydoc_data"),  # tables
}


def standard_library_folder() -> Path:
    """Where this Python keeps its library."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library_text(limit: int = STANDARD_LIBRARY_BYTES) -> bytes:
    """The first `limit` bytes of the standard library's own sources, in the order of their paths.

    Every Python installation carries them; tests, tables and installed packages are left out. The
    text depends on the Python version, and on nothing else. FileNotFoundError where there is none.
    """
    root = standard_library_folder()
    parts: list[bytes] = []
    size = 0
    for path in python_files(root):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if not parts:
        raise FileNotFoundError(f"no Python sources under {root}: name a text file instead")
    return b"".join(parts)[:limit]


def python_files(folder: Path) -> Iterator[Path]:
    """The sources in `folder` and below it, in the order of their paths, without tests, tables and
    installed packages."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _LEFT_OUT:
                yield from python_files(path)
        elif path.suffix == ".py":
            yield path
