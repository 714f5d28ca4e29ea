"""The kernels that building/hub.py writes, as far as they need no compiler."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from building import hub
from building.tools import MINIMUM_TORCH


def test_imports_become_relative() -> None:
    text = (
        "from transformer_kernels import _C as compiled\n"
        "from transformer_kernels.masks.mask import Mask\n"
        "    from transformer_kernels.problem import (\n        Saved,\n    )\n"
        "import torch  # from transformer_kernels\n"
    )
    assert hub.with_relative_imports(text, PurePosixPath("storage.py")).splitlines()[:2] == [
        "from . import _C as compiled",
        "from .masks.mask import Mask",
    ]
    deep = hub.with_relative_imports(text, PurePosixPath("backends/native/cpu.py")).splitlines()
    assert deep[0] == "from ... import _C as compiled"
    assert deep[1] == "from ...masks.mask import Mask"
    assert deep[2] == "    from ...problem import ("
    assert deep[-1] == "import torch  # from transformer_kernels"
    with pytest.raises(ValueError, match=r"a\.py: `import transformer_kernels` cannot be relative"):
        hub.with_relative_imports("import transformer_kernels as tk\n", PurePosixPath("a.py"))


def test_every_import_of_the_package_is_copied() -> None:
    copied = {str(file) for file in hub.sources()} | {"_C.py"}
    for file in hub.sources():
        text = (hub.PACKAGE / file).read_text(encoding="utf-8")
        for line in hub.with_relative_imports(text, file).splitlines():
            words = line.split()
            if words[:1] != ["from"] or not words[1].startswith("."):
                continue
            path = words[1].lstrip(".").replace(".", "/") or words[3]
            assert {f"{path}.py", f"{path}/__init__.py"} & copied, f"{file}: {line}"


@pytest.mark.parametrize(
    ("machine", "system", "expected"),
    [
        ("x86_64", "Linux", "cpu-x86_64-linux"),
        ("arm64", "Darwin", "cpu-aarch64-darwin"),
        ("AMD64", "Windows", "cpu-x86_64-windows"),
    ],
)
def test_variants(machine: str, system: str, expected: str) -> None:
    abi = "torch-stable-abi" + "".join(map(str, MINIMUM_TORCH))
    assert hub.variant(machine, system) == f"{abi}-{expected}"


def test_identifiers_differ() -> None:
    """Between kernels, and between versions of their sources."""
    texts = {"a.py": "1"}
    names = {hub.identifier(kernel, texts) for kernel in hub.KERNELS}
    names.add(hub.identifier("attention", {"a.py": "2"}))
    assert len(names) == 3
    assert all(name.isidentifier() for name in names)
