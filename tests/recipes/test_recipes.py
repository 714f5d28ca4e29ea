"""The recipes of CONTRIBUTING.md: toys that are added by them touch the listed files and no other,
and then run in every backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from building.extension import ROOT
from tests.recipes import toy_tree
from tests.recipes.edits import SHIFT, STRIPES
from tests.support.edits import Edit, edited_texts
from tests.support.emulated import NOT_EMULATED

CHILD_TESTS = ("tests/recipes/toy_calls.py", "tests/problem/test_fields.py")


def recipes() -> dict[str, list[str]]:
    """The paths in the first column of each recipe's table, by heading."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return {
        heading: [
            path
            for column in re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE)
            for path in re.findall(r"`([^`]*)`", column)
        ]
        for heading, section in re.findall(r"^## (To add .*)\n((?:(?!## ).*\n)*)", text, re.M)
    }


@pytest.mark.parametrize(
    ("recipe", "toy", "most"),
    [("To add a score option", SHIFT, 10), ("To add a kind of mask", STRIPES, 8)],
    ids=["score option", "kind of mask"],
)
def test_a_toy_touches_the_files_of_its_recipe(
    recipe: str, toy: tuple[Edit, ...], most: int
) -> None:
    listed = recipes()[recipe]
    assert sorted({edit.source for edit in toy}) == sorted(listed)
    assert len(listed) <= most


def test_edits_apply_to_the_current_sources() -> None:
    for file, text in edited_texts((*SHIFT, *STRIPES), ROOT).items():
        assert text != (ROOT / file).read_text(encoding="utf-8")


def test_recipes_name_files_that_exist() -> None:
    found = recipes()
    assert len(found) == 9
    for recipe, paths in found.items():
        assert paths, recipe
        missing = [path for path in paths if "<" not in path and not (ROOT / path).is_file()]
        assert missing == [], recipe


@pytest.mark.exhaustive
@pytest.mark.skipif(NOT_EMULATED is not None, reason=f"needs the emulator: {NOT_EMULATED}")
def test_the_toys_run_in_every_backend(tmp_path: Path) -> None:
    """Both toys in one copy of the tree. A process can register an operator only once."""
    toy_tree.make(tmp_path)
    switches = {"TRITON_INTERPRET": "1", "TRANSFORMER_KERNELS_EMULATOR": "0"}
    environment = os.environ | switches | {"PYTHONPATH": str(tmp_path)}
    options = ("--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider", "-q")
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *CHILD_TESTS],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(child.stdout, child.stderr)
    assert child.returncode == 0
    assert "skipped" not in child.stdout
