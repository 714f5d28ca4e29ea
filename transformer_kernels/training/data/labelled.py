"""Labelled texts for classification: film reviews, and snippets of Python source."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import torch
from torch import Tensor

from ...nn.options import check_positive
from .dataset import Batch, RaggedTokens, digest_of, evenly_spaced, pad_rows
from .text import python_files, standard_library_folder
from .tokens import Tokens

REVIEW_CLASSES = {"negative": "neg", "positive": "pos"}
"""Folder of each class"""

SNIPPET_CLASSES = {
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

HELD_OUT_SNIPPETS = 0.2
"""Maximum share of a class's bytes that is held out, in whole files."""

_IMPORT = re.compile(rb"\s*(import|from)\b")
_MIN_FRACTION = 4
"""A snippet has at least 1 / _MIN_FRACTION of the maximum length."""


@dataclass(frozen=True)
class LabelledTexts:
    """Dataset of labelled texts: {"tokens": (B, T), "lengths": (B,), "labels": (B,)}.

    A random training example has a uniformly random class, then a random text of that class.
    Held-out examples cycle through the classes, with as many of each class as available.
    """

    name: str
    source: str | None
    digest: str
    classes: tuple[str, ...]
    """Class names; the index is the label"""
    tokens: Tokens
    train: tuple[RaggedTokens, ...]
    """Texts of each class, at least one"""
    validation: tuple[RaggedTokens, ...]
    """Texts of each class, at least one"""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(len(self.classes), (count,), generator=generator)
        sizes = torch.tensor([len(rows) for rows in self.train])
        numbers = torch.randint(2**62, (count,), generator=generator)
        return _batch(self.train, labels, numbers % sizes[labels])

    def held_out(self, count: int) -> Batch:
        chosen: list[tuple[int, int, int]] = []
        for label, rows in enumerate(self.validation):
            own = len(range(label, count, len(self.classes)))
            spaced = evenly_spaced(len(rows), own).tolist()
            chosen += [(position, label, row) for position, row in enumerate(spaced)]
        _, labels, found = torch.tensor(sorted(chosen)).view(-1, 3).unbind(1)
        return _batch(self.validation, labels, found)


def label_texts(
    train: Sequence[Sequence[bytes]],
    validation: Sequence[Sequence[bytes]],
    *,
    classes: tuple[str, ...],
    tokens: Tokens,
    longest: int,
    name: str,
    source: str | None = None,
) -> LabelledTexts:
    """Makes a dataset of the texts of each class, at least one in each part, none empty.

    A text is cut after `longest` tokens. `source` is the absolute path of the files, if any.
    """
    digest = digest_of("labelled texts", *classes, tokens.to_json(), longest)
    for texts in (*train, *validation):
        digest = digest_of(digest, *texts)
    drawn, held_out = (
        tuple(
            RaggedTokens.of([row[:longest].clone() for row in tokens.encode_all(texts)])
            for texts in part
        )
        for part in (train, validation)
    )
    return LabelledTexts(name, source, digest, classes, tokens, drawn, held_out)


def load_reviews(
    folder: Path | str, context: int = 512, *, tokens: Tokens | None = None
) -> LabelledTexts:
    """Loads the Large Movie Review Dataset; train/ is the training data, test/ is held out.

    Args:
        folder: folder laid out as aclImdb.
        context: maximum number of tokens; longer reviews are cut.
        tokens: tokenizer; None makes each byte a token. See `review_text` to train one.

    Raises:
        OSError: a folder is missing or unreadable.
        ValueError: a folder has no reviews, or a review is empty.
    """
    check_positive("context", context)
    folder = Path(folder)
    return label_texts(
        *([_reviews(folder, part, name) for name in REVIEW_CLASSES] for part in ("train", "test")),
        classes=tuple(REVIEW_CLASSES),
        tokens=tokens or Tokens(),
        longest=context,
        name=str(folder),
        source=str(folder.resolve()),
    )


def review_text(folder: Path | str) -> bytes:
    """All reviews in train/, each followed by a line feed, to train a tokenizer on."""
    texts = [text for name in REVIEW_CLASSES for text in _reviews(Path(folder), "train", name)]
    return b"".join(text + b"\n" for text in texts)


def load_snippets(context: int = 512, *, tokens: Tokens | None = None) -> LabelledTexts:
    """Cuts sources of the standard library into snippets; the label is the part they come from.

    - Every Python installation has this data, and it depends only on the Python version.
    - The maximum length of each snippet is random, between a quarter of `context` and `context`
      bytes, so that batches have padding. Snippets are whole lines.
    - Whole files are held out, selected by a hash of their names, except snippets that also occur
      in other files.
    - Text that reveals the class is removed: opening comments of a file, imports, and lines that
      contain the name of one of the class's modules as a word. Lines longer than `context` are
      removed too.

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
    for name, modules in SNIPPET_CLASSES.items():
        drawn, held_out = (
            [text for file in files for text in cut_source(file, modules, context)]
            for files in _split_files(folder, name)
        )
        known = set(drawn)
        train.append(drawn)
        validation.append([text for text in held_out if text not in known])
    return label_texts(
        train,
        validation,
        classes=tuple(SNIPPET_CLASSES),
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


def _batch(part: Sequence[RaggedTokens], labels: Tensor, rows: Tensor) -> Batch:
    places = zip(labels.tolist(), rows.tolist(), strict=True)
    tokens, lengths = pad_rows([part[label][row] for label, row in places])
    return {"tokens": tokens, "lengths": lengths, "labels": labels}


def _reviews(folder: Path, part: str, name: str) -> list[bytes]:
    class_folder = folder / part / REVIEW_CLASSES[name]
    layout = (
        f"{folder} must contain reviews, one per file, in train/neg/*.txt, train/pos/*.txt, "
        "test/neg/*.txt and test/pos/*.txt"
    )
    if not class_folder.is_dir():
        raise FileNotFoundError(f"the folder {class_folder} does not exist: {layout}")
    texts: list[bytes] = []
    for path in sorted(class_folder.glob("*.txt")):
        texts.append(path.read_bytes())
        if not texts[-1].strip():
            raise ValueError(f"{path} is empty: every file must be a review")
    if not texts:
        raise ValueError(f"the folder {class_folder} has no *.txt files: {layout}")
    return texts


def _split_files(folder: Path, name: str) -> tuple[list[bytes], list[bytes]]:
    """Contents of the training and the held-out files of a class."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for module in SNIPPET_CLASSES[name]
        for path in _files_of(folder, module)
    }
    max_held_out = HELD_OUT_SNIPPETS * sum(len(content) for content in files.values())
    train: list[bytes] = []
    validation: list[bytes] = []
    for path in sorted(files, key=lambda path: hashlib.sha256(path.encode()).digest()):
        fits = sum(map(len, validation)) + len(files[path]) <= max_held_out
        (validation if fits else train).append(files[path])
    if not train or not validation:
        raise FileNotFoundError(
            f"the class {name} needs at least two source files in {folder}, got {len(files)}"
        )
    return train, validation


def _files_of(folder: Path, module: str) -> list[Path]:
    file = folder / f"{module}.py"
    if file.is_file():
        return [file]
    return list(python_files(folder / module)) if (folder / module).is_dir() else []


def _after_opening_comments(source: bytes) -> list[bytes]:
    lines = source.splitlines(keepends=True)
    return list(dropwhile(lambda line: line.lstrip()[:1] in (b"", b"#"), lines))


def _long_enough(lines: list[bytes], context: int) -> Iterator[bytes]:
    text = b"".join(lines).strip(b"\r\n")
    if len(text) * _MIN_FRACTION >= context:
        yield text
