"""Sources of the standard library: text that every Python installation has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

STANDARD_LIBRARY_BYTES = 8_000_000
"""Size of the default corpus; all sources together have about 10 MB."""

_EXCLUDED = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "msilib", "pydoc_data"),  # tables
}


def standard_library_folder() -> Path:
    """Folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library_text(limit: int = STANDARD_LIBRARY_BYTES) -> bytes:
    """The first `limit` bytes of the standard library's sources, concatenated in path order.

    Excludes tests, tables and installed packages. The text depends only on the Python version.

    Raises:
        FileNotFoundError: this Python has no sources.
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
        raise FileNotFoundError(f"no Python sources in {root}: specify a text file instead")
    return b"".join(parts)[:limit]


def python_files(folder: Path) -> Iterator[Path]:
    """Yields the sources below `folder` in path order, except tests, tables and packages."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _EXCLUDED:
                yield from python_files(path)
        elif path.suffix == ".py":
            yield path
