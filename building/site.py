"""Builds the site, in build/site: `make docs`.

Fails on broken links, and on public names that the reference does not have.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from building.extension import ROOT

SITE = ROOT / "build" / "site"
PACKAGE = "transformer_kernels"
MODULES = (
    PACKAGE,
    *(f"{PACKAGE}.integrations.{name}" for name in ("huggingface", "flash_attn", "xformers")),
    *(f"{PACKAGE}.{name}" for name in ("distributed", "nn", "models", "training")),
)
"""Modules whose `__all__` is public."""


def documented(inventory: Path) -> set[str]:
    """Returns the names in an inventory of mkdocstrings, which has Sphinx's format."""
    *_, content = inventory.read_bytes().split(b"\n", 4)
    return {line.split()[0] for line in zlib.decompress(content).decode().splitlines()}


def missing_names(names: set[str]) -> Iterator[str]:
    """Yields the public names of the package that are not among `names`."""
    for module in map(importlib.import_module, MODULES):
        for name in set(module.__all__) - {"__version__"}:
            value = getattr(module, name)
            home = getattr(value, "__module__", module.__name__)
            if isinstance(value, ModuleType) or not home.startswith(PACKAGE):
                continue
            if names.isdisjoint((f"{module.__name__}.{name}", f"{home}.{name}")):
                yield f"{module.__name__}.{name}"


def main() -> None:
    # Not --quiet: that would hide warnings from the strict mode of mkdocs.yml.
    build = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    if missing := list(missing_names(documented(SITE / "objects.inv"))):
        sys.exit(f"docs/reference lacks {', '.join(missing)}")
    print(f"the site: {SITE / 'index.html'}")


if __name__ == "__main__":
    main()
