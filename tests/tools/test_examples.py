"""The programs of examples/ run, and print what they document, but for the numbers."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from building.extension import ROOT

FOLDER = ROOT / "examples"
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")


def without_numbers(text: str) -> str:
    return NUMBER.sub("#", text.strip())


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    """In a process of its own: some start processes, and `register()` lasts."""
    folders = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": folders}  # the package need not be installed
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    _, shown, documented = docstring.partition(f"    $ python examples/{path.name}\n")
    assert shown
    command = [sys.executable, str(path)]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    expected = "\n".join(line.removeprefix("    ") for line in documented.splitlines())
    assert without_numbers(run.stdout) == without_numbers(expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path: Path) -> None:
    variables: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), variables)
            expected = "".join(line for output in cell["outputs"] for line in output["text"])
            assert without_numbers(printed.getvalue()) == without_numbers(expected)


def test_the_list_names_every_example() -> None:
    listed = re.findall(r"\]\((.*)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    files = [path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")]
    assert sorted(listed) == sorted(files)
