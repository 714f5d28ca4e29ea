"""Labelled snippets of Python source: the label is the part of the standard library they come from.

Every Python installation has this data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from ...nn.options import check_positive
from .labelled import LabelledTexts, label_texts
from .standard_library import python_files, standard_library_folder
from .tokens import Tokens

CLASSES = {
    "archives": ("bz2", "gzip", "lzma", "shutil", "tarfile", "zipapp", "zipfile"),
    "asyncio": ("asyncio",),
    "email": ("email",),
    "importlib": ("importlib", "modulefinder", "pkgutil", "runpy", "zipimport"),
    "multiprocessing": ("multiprocessing", "concurrent"),
    "numbers": ("_pydecimal", "decimal", "fractions", "numbers", "random", "statistics"),
    "syntax": ("ast", "code", "dis", "inspect", "pyclbr", "symtable", "tokenize"),
    "unittest": ("unittest", "doctest"),
    "web": ("http", "urllib", "wsgiref", "xmlrpc"),
    "xml": ("xml", "html"),
}
"""Modules and packages of each class: 220 to 560 kB of source per class in Python 3.11. All of them
exist in every version from 3.11 on."""

HELD_OUT = 0.2
"""Maximum share of a class's bytes that is held out, in whole files."""

_IMPORT = re.compile(rb"\s*(import|from)\b")
_MIN_FRACTION = 4
"""A snippet has at least 1 / _MIN_FRACTION of the maximum length."""


def load_snippets(context: int = 512, *, tokens: Tokens | None = None) -> LabelledTexts:
    """Cuts the sources of `CLASSES` into labelled snippets of whole lines.

    - The maximum length of each snippet is random, between a quarter of `context` and `context`
      bytes, so that batches have padding.
    - Whole files are held out, selected by a hash of their names, except snippets that also occur
      in other files.
    - Text that reveals the class is removed: opening comments of a file, imports, and lines that
      contain the name of one of the class's modules as a word. Lines longer than `context` are
      removed too.
    - The snippets depend only on the Python version.

    Args:
        context: maximum length of a snippet in bytes, at least 64.
        tokens: tokenizer; None makes each byte a token.

    Raises:
        ValueError: `context` is too small.
        FileNotFoundError: the sources of a class are missing, as in a Python without sources.
    """
    check_positive("context", context)
    if context < 64:
        raise ValueError(f"context must be at least 64 for lines of source, got {context}")
    folder = standard_library_folder()
    train: list[list[bytes]] = []
    validation: list[list[bytes]] = []
    for name, modules in CLASSES.items():
        drawn, held_out = (
            [text for file in files for text in cut_source(file, modules, context)]
            for files in _split(folder, name)
        )
        known = set(drawn)
        train.append(drawn)
        validation.append([text for text in held_out if text not in known])
    return label_texts(
        train,
        validation,
        classes=tuple(CLASSES),
        tokens=tokens or Tokens(),
        longest=context,
        name="snippets of the Python standard library",
    )


def cut_source(source: bytes, modules: tuple[str, ...], context: int) -> Iterator[bytes]:
    """Cuts `source` at line ends into snippets, without the lines that reveal its class."""
    named = re.compile(rb"\b(" + b"|".join(name.encode() for name in modules) + rb")\b", re.I)
    lengths = torch.Generator().manual_seed(len(source))
    lines: list[bytes] = []
    size = limit = 0
    for line in _after_opening_comments(source):
        if _IMPORT.match(line) or named.search(line) or len(line) > context:
            continue
        if size + len(line) > limit and lines:
            yield from _long_enough(lines, context)
            lines, size = [], 0
        if not lines:
            limit = int(torch.randint(context // _MIN_FRACTION, context + 1, (), generator=lengths))
        lines.append(line)
        size += len(line)
    yield from _long_enough(lines, context)


def _long_enough(lines: list[bytes], context: int) -> Iterator[bytes]:
    text = b"".join(lines).strip(b"\r\n")
    if len(text) * _MIN_FRACTION >= context:
        yield text


def _after_opening_comments(source: bytes) -> list[bytes]:
    lines = source.splitlines(keepends=True)
    opening = 0
    while opening < len(lines) and lines[opening].lstrip()[:1] in (b"", b"#"):
        opening += 1
    return lines[opening:]


def _split(folder: Path, name: str) -> tuple[list[bytes], list[bytes]]:
    """Training and held-out files of a class."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for module in CLASSES[name]
        for path in _files_of(folder, module)
    }
    max_held_out = HELD_OUT * sum(len(content) for content in files.values())
    train: list[bytes] = []
    validation: list[bytes] = []
    size = 0
    for path in sorted(files, key=lambda path: hashlib.sha256(path.encode()).digest()):
        if size + len(files[path]) <= max_held_out:
            validation.append(files[path])
            size += len(files[path])
        else:
            train.append(files[path])
    if not train or not validation:
        raise FileNotFoundError(
            f"the class {name} needs at least two source files in {folder}, got {len(files)}"
        )
    return train, validation


def _files_of(folder: Path, module: str) -> Iterator[Path]:
    if (folder / f"{module}.py").is_file():
        yield folder / f"{module}.py"
    elif (folder / module).is_dir():
        yield from python_files(folder / module)
