"""Layers of the package and of csrc/: imports and includes only descend."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from building.extension import ROOT
from tests.support.imports import MODULES, PACKAGE, imported_by
from tests.support.tiers import each

CSRC = ROOT / "csrc"

LAYERS = (
    "cli",
    "training",
    "models",
    "nn",
    "bench",
    "info",
    "integrations",
    "distributed",
    "functional",
    "linear",
    "dispatch",
    "backends",
    "problem",
    "scores",
    "masks",
    "common",
    "version",
)
"""Folders and modules of the package, top layer first. Each may import only those below it."""

C_LAYERS = (
    {"bindings"},
    {"bindings/fast_path"},
    {"cpu/driver"},
    {"cpu/delta"},
    {"cpu/attention", "cpu/conv", "cpu/linear"},
    {"cpu/engine"},
    {"cuda"},
    {"cuda/sm80", "cuda/sm90", "cuda/linear"},
    {"cuda/common"},
    {"cuda/platform", "emulator"},
    {"common"},
)
"""Folders of csrc/, top layer first. Folders of one layer do not include each other.

csrc/emulator takes the place of a part of csrc/ in the build for the CPU: its folders are searched
before those of csrc/, and have the layers of the folders they are named after. They may include
those, and the emulator itself, which nothing else may include."""

IMPORT_EACH_ALONE = """
import importlib, os, sys, types

# Third-party imports first. Each module then starts as in a fresh interpreter.
import hypothesis, matplotlib.pyplot, rich.console, rich.progress, safetensors, tokenizers, torch
import torch._dynamo, torch.profiler, triton

root = types.ModuleType("transformer_kernels")
root.__path__ = [sys.argv[1]]
sys.modules["transformer_kernels"] = root
assert not [name for name in sys.modules if name.startswith("transformer_kernels.")]
for name in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def layer(module: str) -> int:
    """Returns the index of the module's layer; -1 for the package root."""
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] != "__main__" else -1


def test_every_module_has_a_layer() -> None:
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__init__", "__main__", "__pycache__"} == set(LAYERS)


@each("name", MODULES)
def test_imports_are_relative_and_only_descend(name: str) -> None:
    for imported in imported_by(name):
        package, _, rest = imported.partition(".")
        assert package not in ("building", "tests", "benchmarks")
        if package == "transformer_kernels" and rest not in ("", "_C"):
            assert layer(imported) >= layer(name), f"{name} imports {imported}, which is above it"


@each("name", [name for name in MODULES if ".backends." in name])
def test_backends_do_not_import_each_other(name: str) -> None:
    backends = {"native", "triton", "reference"}
    own = name.split(".")[2]
    for imported in imported_by(name):
        if imported.startswith("transformer_kernels.backends."):
            assert imported.split(".")[2] not in backends - {own}


def test_one_module_imports_the_extension() -> None:
    importing = {name for name in MODULES if "transformer_kernels._C" in imported_by(name)}
    assert importing == {"transformer_kernels.backends.native.extension"}


def test_one_module_uses_private_symbols_of_torch() -> None:
    private = re.compile(r"\b(torch|forward_ad)\._[a-zA-Z](?!ynamo\")|\.(_op_dk|_destroy)\b")
    using = {path.stem for path in PACKAGE.rglob("*.py") if private.search(path.read_text())}
    assert using == {"torch_private"}


@pytest.mark.exhaustive
def test_each_module_imports_on_its_own() -> None:
    """With an empty package __init__, so that no import order hides a cycle."""
    names = [name for name in MODULES if not name.endswith("__main__") and "." in name]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH_ALONE, str(PACKAGE), *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == ""


def c_layer(folder: str) -> int:
    name = folder.removeprefix("emulator/")
    return next(n for n, folders in enumerate(C_LAYERS) if name in folders)


@each(
    "path", [path for path in sorted(CSRC.rglob("*")) if path.is_file()], ids=lambda path: path.name
)
def test_includes_only_descend(path: Path) -> None:
    own = str(path.parent.relative_to(CSRC))
    is_emulator = own.split("/")[0] == "emulator"
    for include in re.findall(r'#include "([^"]+)"', path.read_text()):
        assert (CSRC / include).is_file(), f"{include} is not relative to csrc/"
        other = str(PurePosixPath(include).parent)
        if other == own:
            continue
        assert {own.split("/")[0], other.split("/")[0]} != {"cpu", "cuda"}
        if is_emulator:
            assert c_layer(other) >= c_layer(own), f"{include} is above {own}"
        else:
            assert not other.startswith("emulator"), f"{own} includes {include}"
            assert c_layer(other) > c_layer(own), f"{include} is above {own}"


def test_headers_of_the_emulator_take_the_place_of_others() -> None:
    for path in (CSRC / "emulator").glob("*/**/*.h"):
        assert (CSRC / path.relative_to(CSRC / "emulator")).is_file()
