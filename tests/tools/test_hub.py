"""The kernels that building/hub.py writes, as far as they need no compiler."""

from __future__ import annotations

import pytest

from building import hub
from building.tools import MINIMUM_TORCH
from tests.support.imports import imported_by, module_name


def test_every_import_of_the_package_is_copied() -> None:
    copied = {module_name(hub.PACKAGE / file) for file in hub.sources()}
    for name in sorted(copied):
        missing = {one for one in imported_by(name) if one.startswith("transformer_kernels.")}
        assert missing <= copied | {"transformer_kernels._C"}, f"{name} imports {missing - copied}"


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
