"""Wheels: contents, size, platform tag, instruction sets. Kernels for HuggingFace's hub."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from building import hub, wheel
from building.extension import LIBRARY, OBJECTS, ROOT
from building.tools import MINIMUM_TORCH, missing_tools
from building.wheel_tests import newest_wheel, source_archive, tree
from tests.support.imports import imported_by, module_name

NO_TOOLS = missing_tools(os.environ, Path(sysconfig.get_path("include")))
needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or bool(NO_TOOLS), reason=f"needs Linux and {NO_TOOLS}"
)

MAX_MEGABYTES = 3.2
"""of a wheel without CUDA kernels"""

VECTOR_CODE = re.compile(r"\t(?:v[a-z]|.*%tmm)")
"""Instructions of AVX and later have names with v; AMX has tile registers."""


NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
"""Versions of symbols that an extension may need."""


def too_new(symbols: str) -> set[tuple[str, str]]:
    """The versions of symbols, in the output of objdump, that are newer than NEWEST."""
    return {
        (name, version)
        for name, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", symbols)
        if tuple(map(int, version.split("."))) > NEWEST[name]
    }


def program(folder: Path, name: str, prints: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
    path.chmod(0o755)
    return str(path)


def test_the_wheel_that_was_built_last_is_tested(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no wheel"):
        newest_wheel(tmp_path)
    for seconds, name in enumerate(["a-1-cp311-abi3-x", "a-0-cp311-abi3-x", "a-2-cp311-cp311-x"]):
        (tmp_path / f"{name}.whl").touch()
        os.utime(tmp_path / f"{name}.whl", (seconds, seconds))
    assert newest_wheel(tmp_path).name == "a-0-cp311-abi3-x.whl"


def test_the_source_archive_is_that_of_the_wheels_version(tmp_path: Path) -> None:
    built = tmp_path / "transformer_kernels-0.2.0+cu130-cp311-cp311-linux_x86_64.whl"
    with pytest.raises(FileNotFoundError, match=r"transformer_kernels-0\.2\.0\.tar\.gz"):
        source_archive(built)
    archive = tmp_path / "transformer_kernels-0.2.0.tar.gz"
    archive.touch()
    assert source_archive(built) == archive


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A wheel without CUDA kernels. Its objects are those of the extension."""
    with (ROOT / "build/wheel.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # setup.py sdist writes into ROOT
        patch.setenv("TORCH_CUDA_ARCH_LIST", "none")
        patch.setattr(wheel, "WORK", tmp_path_factory.mktemp("work"))
        out = tmp_path_factory.mktemp("dist")
        wheel.main(["--out", str(out)])
        yield next(out.glob("*.whl"))


@needs_linux
@pytest.mark.exhaustive
def test_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = {name for name in zipfile.ZipFile(built).namelist() if not name.endswith("/")}
    package = {name for name in names if name.startswith("transformer_kernels/")}
    tracked = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.jinja", "py.typed")
        for path in (ROOT / "transformer_kernels").rglob(pattern)
    }
    assert package == tracked | {f"transformer_kernels/{LIBRARY}", "transformer_kernels/_C.pyi"}
    assert {name.partition("/")[0] for name in names - package} == {
        f"{built.name.split('-cp')[0]}.dist-info"
    }
    assert "-cp311-abi3-" in built.name
    assert built.stat().st_size / 1e6 < MAX_MEGABYTES


@needs_linux
@pytest.mark.exhaustive
def test_extension_needs_an_old_system_only(built: Path, tmp_path: Path) -> None:
    """Symbols of glibc 2.28 and libstdc++ 8: manylinux_2_28, and the limits of the hub."""
    assert re.search(r"manylinux_2_2[0-8]_", built.name)
    (name,) = (x for x in zipfile.ZipFile(built).namelist() if x.endswith(".so"))
    library = zipfile.ZipFile(built).extract(name, tmp_path)
    symbols = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True)
    assert too_new(symbols.stdout) == set()
    defined = {
        line.split()[-1]
        for line in symbols.stdout.splitlines()
        if line.startswith("0") and "*UND*" not in line
    }
    assert defined == {"PyInit__C"}
    header = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, check=True)
    needs = set(re.findall(r"NEEDED +(\S+)", header.stdout))
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
    assert needs - system <= {"libtorch.so", "libtorch_cpu.so", "ld-linux-x86-64.so.2"}
    assert not re.search(r"R(UN)?PATH", header.stdout)


@needs_linux
@pytest.mark.exhaustive
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.usefixtures("built")
def test_vector_instructions_are_in_kernels_of_an_instruction_set_only() -> None:
    """The kernels are in namespaces named after it, which driver/isa_dispatch.cpp calls after a
    check of the CPU. The wheel's extension is this one without its names."""
    library = ROOT / OBJECTS / LIBRARY
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.split(r"\n[0-9a-f]+ <(.+)>:\n", text)[1:]
    vector = {
        name
        for name, body in zip(functions[::2], functions[1::2], strict=True)
        if VECTOR_CODE.search(body)
    }
    isas = "4avx2|6avx512|11avx512_bf16|3amx"
    kernels = {name for name in vector if re.search(f"2tk3cpu.*({isas})", name)}
    assert len(kernels) > 100
    assert vector - kernels == set()


@needs_linux
@pytest.mark.exhaustive
def test_installed_package_replaces_that_of_the_source_archive(built: Path, tmp_path: Path) -> None:
    """The wheel is unpacked, as pip does, for a Python that has the packages of this one."""
    site = tmp_path / "site"
    zipfile.ZipFile(built).extractall(site)
    python = program(tmp_path, "python", str(site))
    root = tree(tmp_path / "source", source_archive(built), Path(python))
    assert (root / "transformer_kernels").resolve() == site / "transformer_kernels"
    code = "from transformer_kernels import _C, info; print(info(), _C.__file__, sep='\\n')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert "cpu: available" in result.stdout
    assert Path(result.stdout.splitlines()[-1]).resolve().is_relative_to(site)


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
    assert len(names) == len(hub.KERNELS) + 1
    assert all(name.isidentifier() for name in names)
