"""Files and anchors that the documents name exist."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from building.extension import ROOT
from tests.support.tiers import each

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("transformer_kernels", "csrc", "tests", "benchmarks", "building", "docs", "requirements")
FILES = [
    str(path.relative_to(ROOT))
    for folder in (*FOLDERS, ".")
    for path in ((ROOT / folder).rglob("*") if folder != "." else ROOT.iterdir())
    if path.is_file()
]
NAMED = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w*-]+\.(?:cuh|cu|cpp|h|py|pyi|md|toml|csv|svg))\b")
WRITTEN_BY_USERS = {"summary.txt", "my.txt"}


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


def headings(text: str) -> set[str]:
    """Anchors of the headings, as GitHub derives them."""
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
