"""Builds the site, in build/site: `make docs`. It needs neither torch nor the extension.

Fails on broken links, and on public names that the reference does not have.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
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
