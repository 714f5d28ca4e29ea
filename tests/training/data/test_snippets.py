"""Tests of labelled snippets of the standard library."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch

from transformer_kernels.training.data import LabelledTexts, load_snippets, train_tokens
from transformer_kernels.training.data.snippets import CLASSES, cut_source
from transformer_kernels.training.data.standard_library import python_files


@pytest.fixture(scope="module")
def dataset() -> LabelledTexts:
    return load_snippets(256)


def sources(folder: Path, module: str) -> list[Path]:
    alone = folder / f"{module}.py"
    return [alone] if alone.is_file() else list(python_files(folder / module))


def texts(dataset: LabelledTexts, part: str, label: int) -> list[bytes]:
    rows = getattr(dataset, part)[label]
    return [dataset.tokens.decode(rows[number]) for number in range(len(rows))]


def test_every_class_has_enough_text(dataset: LabelledTexts) -> None:
    assert dataset.classes == tuple(CLASSES)
    assert len(dataset.classes) == 10
    for train, validation in zip(dataset.train, dataset.validation, strict=True):
        assert len(train.values) > 150_000
        assert len(validation.values) > 20_000


def test_lengths_vary_between_a_quarter_of_the_context_and_the_context(
    dataset: LabelledTexts,
) -> None:
    lengths = dataset.draw(300, torch.Generator().manual_seed(0))["lengths"]
    assert 64 <= lengths.min() < 90
    assert 220 < lengths.max() <= 256


def test_no_file_is_in_training_and_validation(dataset: LabelledTexts) -> None:
    """Long lines that occur in a single file occur in snippets of one part only."""
    folder = Path(sysconfig.get_path("stdlib"))
    for label, name in enumerate(CLASSES):
        parts = [
            {line for text in texts(dataset, part, label) for line in text.splitlines()}
            for part in ("train", "validation")
        ]
        lines: Counter[bytes] = Counter()
        files = [path.read_bytes() for module in CLASSES[name] for path in sources(folder, module)]
        for file in files:
            lines.update({line for line in file.splitlines() if len(line) > 50})
        for file in files:
            own = {line for line in file.splitlines() if lines[line] == 1}
            assert not (own & parts[0] and own & parts[1]), name


def test_no_snippet_is_in_training_and_validation(dataset: LabelledTexts) -> None:
    for label in range(len(CLASSES)):
        trained, held_out = (set(texts(dataset, part, label)) for part in ("train", "validation"))
        assert not trained & held_out


def test_imports_and_module_names_are_removed(dataset: LabelledTexts) -> None:
    for label, modules in enumerate(CLASSES.values()):
        named = re.compile(rb"\b(" + b"|".join(m.encode() for m in modules) + rb")\b", re.I)
        for part in ("train", "validation"):
            for text in texts(dataset, part, label):
                assert not named.search(text)
                assert not re.search(rb"^\s*(import|from)\b", text, re.M)


def test_source_is_cut_at_line_ends() -> None:
    source = (
        b"#! /usr/bin/env python\n# Copyright by somebody\n\n"
        b'"""Post."""\n\nimport os\nfrom . import parser\n'
        b"EMAIL = 1  # Email\nemailed = 2\n" + b"x" * 200 + b"\n"
    ) + b"".join(b"    line_%d = None\n" % i for i in range(60))
    pieces = list(cut_source(source, ("email",), 100))
    lines = [line for piece in pieces for line in piece.split(b"\n") if line]
    assert lines[:2] == [b'"""Post."""', b"emailed = 2"]
    assert set(lines) <= set(source.split(b"\n"))
    assert len(lines) > 55
    assert all(25 <= len(piece) <= 100 for piece in pieces)
    assert len({len(piece) for piece in pieces}) > 5


def test_snippets_with_a_byte_pair_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"tomllib": ("tomllib",), "json": ("json",)}
    monkeypatch.setattr("transformer_kernels.training.data.snippets.CLASSES", classes)
    tokens = train_tokens(b"self.assertEqual(result, None)\n" * 9, 300)
    dataset = load_snippets(64, tokens=tokens)
    assert dataset.classes == ("tomllib", "json")
    assert dataset.tokens == tokens
    assert dataset.draw(50, torch.Generator())["tokens"].max() >= 256


def test_too_short_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context must be at least 64 for lines of source, got 63"):
        load_snippets(63)
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        load_snippets(0)


def test_python_without_sources_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    refused = r"the class archives needs at least two source files in .*, got 0"
    with pytest.raises(FileNotFoundError, match=refused):
        load_snippets()
