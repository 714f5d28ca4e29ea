"""Files, folders, anchors and recipes in the documents are those of the repository."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import transformer_kernels as tk
from building.extension import ROOT
from tests.support.tiers import each
from transformer_kernels.models import GPT2, GPT2Config

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


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.exhaustive
def test_the_example_of_the_readme_runs() -> None:
    (example,) = blocks("README.md")
    found: dict[str, Any] = {}
    exec(example, found)
    q, k, v = (found[name] for name in "qkv")
    torch.testing.assert_close(found["o"], scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", ["docs/linear.md", "docs/delta.md"])
def test_the_lines_of_a_page_run(page: str) -> None:
    """With prompts of one token, which steps take too."""
    q, k, v = torch.randn(3, 1, 2, 1, 4)
    x = torch.randn(1, 6, 1)
    names = {"tk": tk, "q": q, "k": k, "v": v, "q_next": q, "k_next": k, "v_next": v}
    names |= {"log_decay": -torch.rand(1, 2, 1), "beta": torch.rand(1, 2, 1)}
    names |= {"x": x, "x_next": x, "weight": torch.randn(6, 4), "bias": torch.ones(6)}
    for block in blocks(page):
        exec(block, names)
    assert names["o"].shape == v.shape


@pytest.mark.exhaustive
def test_the_example_of_several_devices_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of one process. tests/distributed has models of transformers."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    config = GPT2Config(layers=1, heads=2, width=8, vocabulary=10, context=8)
    tokens = torch.randint(10, (1, 8))
    names: dict[str, Any] = {"tokens": tokens, "labels": tokens, "positions": torch.arange(8)[None]}
    names |= {"model": GPT2(config), "mesh": None, "count": 8}
    try:
        for block in blocks("docs/scale.md"):
            if "AutoModelForCausalLM" not in block:
                exec(block, names)
    finally:
        dist.destroy_process_group()
    assert names["whole"].shape == (10243, 8, 64)


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
