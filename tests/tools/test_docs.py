"""Files, folders, anchors and recipes in the documents are those of the repository."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from building.extension import ROOT
from tests.support.tiers import each

OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "examples/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (
    *("transformer_kernels", "csrc", "tests", "benchmarks", "building", "docs", "examples"),
    "requirements",
)
FILES = [
    str(path.relative_to(ROOT))
    for folder in (*FOLDERS, ".")
    for path in ((ROOT / folder).rglob("*") if folder != "." else ROOT.iterdir())
    if path.is_file()
]
NAMED = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w*-]+\.(?:cuh|cu|cpp|h|py|pyi|md|toml|csv|svg))\b")
SOURCES = {".py", ".cpp", ".h", ".cu", ".cuh"}
WITH_SOURCES = {
    str(path.parent.relative_to(ROOT))
    for folder in ("transformer_kernels", "csrc", "benchmarks", "building")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in SOURCES
} - {"transformer_kernels"}
WRITTEN_BY_USERS = {"summary.txt", "my.txt", "curve.csv"}


@each("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    names = set(NAMED.findall(page.read_text(encoding="utf-8"))) - WRITTEN_BY_USERS
    missing = [
        name
        for name in names
        if not any(fnmatch(path, name) or fnmatch(path, f"*/{name}") for path in FILES)
    ]
    assert sorted(missing) == []


@each("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.is_file(), target
        if anchor:
            assert anchor in headings(linked.read_text(encoding="utf-8")), target


@pytest.mark.exhaustive
def test_the_example_of_the_readme_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {}
    exec(example, found)
    q, k, v = (found[name] for name in "qkv")
    torch.testing.assert_close(found["o"], scaled_dot_product_attention(q, k, v, is_causal=True))


def headings(text: str) -> set[str]:
    """Anchors of the headings, as GitHub derives them."""
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_list_of_folders_is_that_of_the_repository() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"<!-- folders: begin -->\n(.*?)<!-- folders: end -->", text, re.DOTALL)
    purposes = dict(re.findall(r"^\| `([^`]*)/` \| (.*) \|$", listed, re.MULTILINE))
    assert set(purposes) == WITH_SOURCES
    for folder, purpose in purposes.items():
        init = ROOT / folder / "__init__.py"
        if folder.startswith("transformer_kernels") and init.is_file():
            docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
            assert docstring.split("\n\n")[0].replace("\n", " ").removesuffix(".") == purpose, (
                folder
            )


@pytest.mark.parametrize(("heading", "most"), [("a score option", 10), ("a kind of mask", 8)])
def test_an_extension_touches_few_files(heading: str, most: int) -> None:
    assert 0 < len(recipes()[heading]) <= most


def test_recipes_name_files_that_exist() -> None:
    found = recipes()
    assert len(found) == 9
    for heading, paths in found.items():
        assert paths, heading
        missing = [path for path in paths if "<" not in path and not (ROOT / path).is_file()]
        assert missing == [], heading


def recipes() -> dict[str, list[str]]:
    """The paths in the first column of each recipe's table, by what it adds."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    return {
        heading: [
            path
            for column in re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE)
            for path in re.findall(r"`([^`]*)`", column)
        ]
        for heading, section in re.findall(r"^## To add (.*)\n((?:(?!## ).*\n)*)", text, re.M)
    }
