"""Which part of the standard library a snippet of source comes from: texts with labels that every
Python installation carries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from transformer_kernels.nn.options import check_positive
from transformer_kernels.training.data.labelled import LabelledTexts, label_texts
from transformer_kernels.training.data.standard_library import (
    python_files,
    standard_library_folder,
)
from transformer_kernels.training.data.tokens import Tokens

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
"""The classes, and the modules and packages that each is made of: between 220 and 560 kB of source
each in Python 3.11, all of them in every version from 3.11 on."""

HELD_OUT = 0.2
"""No more than this share of a class's bytes, in whole files, is held out."""

_IMPORT = re.compile(rb"\s*(import|from)\b")
_LEAST = 4
"""A snippet is at least a fourth of the longest one."""


def load_snippets(context: int = 512, *, tokens: Tokens | None = None) -> LabelledTexts:
    """Snippets of the sources of `CLASSES`, whole lines of at most `context` bytes together.

    `tokens` is bytes unless given. How long a snippet may be is drawn between a fourth of `context`
    and the whole, so that batches have padding. Whole files are held out, chosen by a hash of their
    names, less the few snippets that other files have too. What gives the answer away is left out:
    the comments that a file opens with (its name, its authors), imports, and every line with the
    name of one of its class's modules, as a word. Lines longer than `context` are left out as well.
    The snippets depend on the Python version and on nothing else.

    ValueError where `context` is below 64, FileNotFoundError where a class lacks its sources,
    as where Python has none.
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
    """`source` without what gives its class away, in pieces that end where lines do."""
    named = re.compile(rb"\b(" + b"|".join(name.encode() for name in modules) + rb")\b", re.I)
    lengths = torch.Generator().manual_seed(len(source))
    lines: list[bytes] = []
    size = limit = 0
    for line in _after_opening_comments(source):
        if _IMPORT.match(line) or named.search(line) or len(line) > context:
            continue
        if size + len(line) > limit and lines:
            yield from _joined(lines, context)
            lines, size = [], 0
        if not lines:
            limit = int(torch.randint(context // _LEAST, context + 1, (), generator=lengths))
        lines.append(line)
        size += len(line)
    yield from _joined(lines, context)


def _joined(lines: list[bytes], context: int) -> Iterator[bytes]:
    text = b"".join(lines).strip(b"\r\n")
    if len(text) * _LEAST >= context:
        yield text


def _after_opening_comments(source: bytes) -> list[bytes]:
    lines = source.splitlines(keepends=True)
    opening = 0
    while opening < len(lines) and lines[opening].lstrip()[:1] in (b"", b"#"):
        opening += 1
    return lines[opening:]


def _split(folder: Path, name: str) -> tuple[list[bytes], list[bytes]]:
    """The files of a class: those for training, and those that are held out."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for module in CLASSES[name]
        for path in _files_of(folder, module)
    }
    most = HELD_OUT * sum(len(content) for content in files.values())
    train: list[bytes] = []
    validation: list[bytes] = []
    size = 0
    for path in sorted(files, key=lambda path: hashlib.sha256(path.encode()).digest()):
        if size + len(files[path]) <= most:
            validation.append(files[path])
            size += len(files[path])
        else:
            train.append(files[path])
    if not train or not validation:
        raise FileNotFoundError(
            f"the class {name} needs two sources or more under {folder}, and there are {len(files)}"
        )
    return train, validation


def _files_of(folder: Path, module: str) -> Iterator[Path]:
    if (folder / f"{module}.py").is_file():
        yield folder / f"{module}.py"
    elif (folder / module).is_dir():
        yield from python_files(folder / module)
