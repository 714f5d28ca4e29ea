"""Builds the site, in build/site: `make docs`. It needs neither torch nor the extension.

Fails on broken links, and on public names that the reference does not have. mkdocs calls the
functions `on_...`: the pages are those of docs/, the files of examples/ and FROM_OUTSIDE, whose
links are those of the repository.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
EXAMPLES = ROOT / "examples"
FROM_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
}
"""Files outside docs/ that are pages, beside the examples."""
PACKAGE = "transformer_kernels"
MODULES = ("", "integrations.huggingface", "integrations.flash_attn", "integrations.xformers",
           "distributed", "nn", "models", "training")  # fmt: skip
"""Modules of the package whose `__all__` is public."""


def documented(inventory: Path) -> set[str]:
    """Returns the names in an inventory of mkdocstrings, which has Sphinx's format."""
    *_, content = inventory.read_bytes().split(b"\n", 4)
    return {line.split()[0] for line in zlib.decompress(content).decode().splitlines()}


def public_names() -> Iterator[tuple[str, str]]:
    """Yields the path of each public name, and that of its definition."""
    griffe: Any = importlib.import_module("griffe")  # not installed where lint runs
    package = griffe.load(PACKAGE, search_paths=[ROOT])
    for path in MODULES:
        module = package[path] if path else package
        for name in map(str, module.exports):
            member = module.members[name]
            home = member.target_path if member.is_alias else member.path
            if not member.is_alias and member.is_module:  # a function may have its module's name
                home = f"{home}.{name}" if name in member.members else ""
            if home.startswith(PACKAGE) and name != "__version__":
                yield f"{module.path}.{name}", home


def page_of_script(text: str) -> str:
    """Returns the page of a Python file: its docstring, then its code."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, prose = docstring.partition("\n")
    code = text.split('"""', 2)[2].strip()
    return f"# {title.removesuffix('.')}\n{prose}\n\n```python\n{code}\n```\n"


def page_of_notebook(text: str) -> str:
    """Returns the page of a notebook: its cells, with the text that they print."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join(line for output in cell.get("outputs", ()) for line in output["text"])
        if printed:
            parts.append(f"```text\n{printed}```")
    return "\n\n".join(parts)


def picture(text: re.Match[str]) -> str:
    """Returns a picture of a mask that `Mask.show` printed."""
    rows = text[1].split()
    runs = ((i, run) for i, row in enumerate(rows) for run in re.finditer("█+", row))
    path = "".join(f"M{run.start()} {i}h{len(run[0])}v1h-{len(run[0])}z" for i, run in runs)
    width, height = len(rows[0]), len(rows)
    return (
        f'<svg role="img" width="{12 * width}" viewBox="0 0 {width} {height}">'
        f'<rect width="{width}" height="{height}" fill="var(--md-code-bg-color)"/>'
        f'<path d="{path}" fill="var(--md-primary-fg-color)"/></svg>'
    )


@cache
def pages() -> dict[Path, str]:
    """Returns the page of each file of the repository that has one, by its path in the site."""
    found = {path: path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    found |= {ROOT / name: uri for name, uri in FROM_OUTSIDE.items()}
    examples = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]
    return found | {path: f"examples/{path.stem}.md" for path in examples}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of files outside docs/."""
    made = importlib.import_module("mkdocs.structure.files").File
    texts: dict[str, Callable[[str], str]]
    texts = {".py": page_of_script, ".ipynb": page_of_notebook, ".md": str}
    for path, uri in pages().items():
        if ROOT / "docs" not in path.parents:
            content = texts[path.suffix](path.read_text(encoding="utf-8"))
            files.append(made.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Draws masks, and turns links between files of the repository into links between pages."""
    uris, here = pages(), page.file.src_uri
    (folder,) = (path.parent for path, uri in uris.items() if uri == here)

    def relinked(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if (ROOT / "docs" / "images") in target.parents:
            uri = target.relative_to(ROOT / "docs").as_posix()
        elif target in uris:
            uri = uris[target]
        else:
            return link[0]
        return f"]({os.path.relpath(uri, Path(here).parent)}{link[2]})"

    markdown = re.sub(r"```text\n([█·\n]+)```", picture, markdown)
    return re.sub(r"\]\(([\w./-]+)((?:#[\w-]*)?)\)", relinked, markdown)


def main() -> None:
    # Not --quiet: that would hide warnings from the strict mode of mkdocs.yml.
    build = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    names, public = documented(SITE / "objects.inv"), list(public_names())
    if missing := [path for path, home in public if names.isdisjoint((path, home))]:
        sys.exit(f"docs/reference lacks {', '.join(missing)}")
    print(f"the site, with {len(public)} public names: {SITE / 'index.html'}")


if __name__ == "__main__":
    main()
