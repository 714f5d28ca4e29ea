"""Imports of the package's modules."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from building.extension import ROOT

PACKAGE = ROOT / "transformer_kernels"


def module_name(path: Path) -> str:
    """Returns the name of a module, or of a package from its __init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield module_name(path), ast.parse(path.read_text())


MODULES = dict(_modules())


def imported_by(name: str) -> set[str]:
    """Returns the modules that a module imports; for `from package import name`, the name if it is
    a module. Raises ValueError if it imports modules of this package by their full names."""
    found = set()
    is_package = (ROOT / name.replace(".", "/")).is_dir()
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            imported = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{module}.{alias.name}" for alias in node.names}
            imported = (names & set(MODULES)) or {module}
            imported |= {one for one in names if one.endswith("._C")}
            if node.level:
                found |= imported
                continue
        else:
            continue
        if any(one.partition(".")[0] == PACKAGE.name for one in imported):
            raise ValueError(f"{name}, line {node.lineno}: imports in the package are relative")
        found |= imported
    return found
