"""setup.py: units and flags, incremental builds, and errors for missing tools."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from setuptools.errors import PlatformError

from building import tools
from building.extension import LIBRARY, ROOT
from building.host import host_units, isas_for
from building.ninja import Toolchain, job_count, ninja_file
from building.unit import Unit
from tests.support.tiers import each

TORCH = tools.Torch("2.13.0", Path("torch"))
TORCH_INCLUDE = re.compile(r'#include\s*[<"](torch|ATen|c10|caffe2)/')
NO_COMPILER = "needs a C++ compiler on PATH"


def program(folder: Path, name: str, script: str = "exit 0") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with the real setup.py and minimal sources."""
    root = tmp_path / "tree"
    (root / "transformer_kernels").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", root)
    shutil.copytree(ROOT / "building", root / "building", ignore=shutil.ignore_patterns("__pyc*"))
    for unit in host_units("x86_64", TORCH):
        (root / unit.source).parent.mkdir(parents=True, exist_ok=True)
        (root / unit.source).write_text("\n")
    (root / "csrc/answer.h").write_text("#define ANSWER 42\n")
    tiles = "csrc/cuda/common/tile_config.h"
    (root / tiles).parent.mkdir(parents=True)
    shutil.copy(ROOT / tiles, root / tiles)
    (root / "csrc/bindings/module.cpp").write_text(
        '#include "answer.h"\nint module() { return ANSWER; }\n'
    )
    return root


def build(tree: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "--quiet", *(arguments or ("build_ext", "--inplace"))]
    environ = {"TORCH_CUDA_ARCH_LIST": "none"} | environ
    return subprocess.run(
        command, cwd=tree, env=os.environ | environ, capture_output=True, text=True, check=False
    )


def shared_object(tree: Path) -> Path:
    return tree / "transformer_kernels" / LIBRARY


def test_kernels_are_compiled_once_for_each_instruction_set() -> None:
    units = host_units("x86_64", TORCH)

    def isas_of(folder: str) -> list[str]:
        return [unit.variant for unit in units if unit.source == f"csrc/cpu/{folder}/kernels.cpp"]

    assert isas_of("attention") == ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
    assert isas_of("linear") == isas_of("delta") == ["portable", "avx2", "avx512", "amx"]
    assert isas_of("conv") == ["portable", "avx2", "avx512"]
    assert [isa.name for isa in isas_for("aarch64")] == ["portable"]


def test_units_with_pythons_headers_use_the_limited_api() -> None:
    units = {unit.source: unit.flags for unit in host_units("x86_64", TORCH)}
    with_python = {"csrc/bindings/module.cpp", "csrc/bindings/fast_path/functions.cpp"}
    with_python.add("csrc/bindings/fast_path/readers.cpp")
    headers = sysconfig.get_path("include")
    assert {source for source, flags in units.items() if headers in flags} == with_python
    assert {x for x in units if any("Py_LIMITED_API" in y for y in units[x])} == with_python


def test_portable_objects_are_linked_first() -> None:
    needs_isa = [
        any(flag.startswith("-m") for flag in unit.flags) for unit in host_units("x86_64", TORCH)
    ]
    assert needs_isa == sorted(needs_isa)


def test_only_bindings_include_torch_headers() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    seen = {path for path in sources if TORCH_INCLUDE.search(path.read_text())}
    assert {path.parent for path in seen} == {ROOT / "csrc/bindings"}


def test_ninja_file_has_the_compiler_and_flags_of_each_unit() -> None:
    units = (Unit("csrc/a.cpp"), Unit("csrc/cuda/k.cu", ("-DX=1",), "half-64", "nvcc"))
    tools = Toolchain(("g++", "-v"), ("-O3",), ("-ltorch",), ("nvcc", "-std=c++20"))
    lines = [line.strip() for line in ninja_file(units, tools, "out", "out/_C.so", 3).split("\n")]
    assert "build out/csrc/a.o: compile csrc/a.cpp" in lines
    at = lines.index("build out/csrc/cuda/k-half-64.o: compile_cuda csrc/cuda/k.cu")
    assert lines[at + 1 : at + 3] == ["flags = -DX=1", "variant = half-64"]
    assert "build out/_C.so: link out/csrc/a.o out/csrc/cuda/k-half-64.o" in lines
    assert "command = g++ -v -O3 $flags -MD -MF $out.d -c $in -o $out" in lines
    assert "command = g++ -v $in -o $out -ltorch" in lines
    assert any(line.startswith("command = nvcc -std=c++20 $flags ") for line in lines)
    assert lines[lines.index("pool nvcc") + 1] == "depth = 3"


def test_compiler_is_that_of_cxx_or_found_on_path(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert tools.find_compiler(environ) == ()
    for name in ("clang++", "g++"):
        program(tmp_path, name)
        assert tools.find_compiler(environ) == (name,)
    program(tmp_path, "my-c++")
    assert tools.find_compiler(environ | {"CXX": "my-c++ -v"}) == ("my-c++", "-v")
    with pytest.raises(PlatformError, match=r"CXX is 'icpx'"):
        tools.find_compiler(environ | {"CXX": "icpx"})


def test_missing_tools_are_named_with_installation_hints(tmp_path: Path) -> None:
    compiler, headers = tools.missing_tools({"PATH": str(tmp_path)}, tmp_path)
    assert "apt install g++" in compiler
    assert "apt install python3-dev" in headers
    program(tmp_path, "c++")
    (tmp_path / "Python.h").touch()
    assert tools.missing_tools({"PATH": str(tmp_path)}, tmp_path) == []


@pytest.mark.parametrize("package", ["torch", "ninja"])
def test_missing_build_package_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(PlatformError, match=rf"{package} is needed.*pip install '?{package}"):
        getattr(tools, f"find_{package}")()


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.10.1+cpu")
    with pytest.raises(PlatformError, match=r"torch 2\.10\.1\+cpu is too old.*torch>=2\.11"):
        tools.find_torch()


@each(
    ("environ", "cores", "memory_gib", "gib_a_job", "expected"),
    [
        ({}, 8, 31.2, 1, 8),
        ({}, 8, 31.2, 4, 7),
        ({}, 8, 3.9, 1, 3),
        ({}, 8, 3.9, 4, 1),
        ({}, 8, 0.5, 1, 1),
        ({"MAX_JOBS": "5"}, 2, 2.0, 4, 5),
    ],
)
def test_job_count(
    environ: dict[str, str], cores: int, memory_gib: float, gib_a_job: float, expected: int
) -> None:
    assert job_count(environ, cores, memory_gib, gib_a_job) == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_max_jobs_is_refused(text: str) -> None:
    with pytest.raises(PlatformError, match=f"MAX_JOBS is '{re.escape(text)}'"):
        job_count({"MAX_JOBS": text}, 2, 2.0)


@pytest.mark.parametrize("arguments", [("build",), ("build_ext", "--inplace")])
def test_build_without_a_compiler_removes_the_extension_of_an_earlier_build(
    tree: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The build succeeds and reports it. A wheel contains what is in `build/lib*`."""
    library = tree / "build/lib"
    inplace = "--inplace" in arguments
    stale = shared_object(tree) if inplace else library / shared_object(tree).relative_to(tree)
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.write_bytes(b"an earlier build")
    options = () if inplace else (f"--build-lib={library}",)
    result = build(tree, *arguments, *options, PATH=str(tmp_path), CXX="")
    assert result.returncode == 0, result.stderr
    assert "not built: CPU kernels" in result.stdout
    assert "apt install g++" in result.stdout
    assert not stale.exists()


def test_compiler_failure_is_an_error_with_its_output(tree: Path, tmp_path: Path) -> None:
    compiler = program(tmp_path, "broken-c++", "echo 'error: out of registers' >&2; exit 1")
    result = build(tree, CXX=str(compiler))
    assert result.returncode != 0
    assert "error: out of registers" in result.stdout + result.stderr
    assert "did not compile" in result.stderr
    assert "Traceback" not in result.stderr
    assert not shared_object(tree).exists()


@pytest.mark.quick
@pytest.mark.skipif(not tools.find_compiler(os.environ), reason=NO_COMPILER)
def test_rebuild_compiles_only_dependents_of_a_changed_header(tree: Path) -> None:
    first = build(tree)
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.count("compile csrc/") == len(host_units(os.uname().machine, TORCH))
    assert "built:     CPU kernels for portable" in first.stdout
    assert "not built: CUDA kernels: TORCH_CUDA_ARCH_LIST is 'none'" in first.stdout
    assert shared_object(tree).is_file()

    assert "no work to do" in build(tree).stdout

    (tree / "csrc/answer.h").write_text("#define ANSWER 43\n")
    again = build(tree).stdout
    assert "compile csrc/bindings/module.cpp" in again
    assert "compile csrc/bindings/cpu_operators.cpp" not in again


@pytest.mark.quick
def test_source_archive_contains_the_build_inputs(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("csrc", "building")
    needed = {
        str(path.relative_to(ROOT)) for name in folders for path in (ROOT / name).rglob("*.*")
    }
    needed = {name for name in needed if not name.endswith(".pyc")}
    package = {"transformer_kernels/py.typed", "transformer_kernels/_C.pyi"}
    assert needed | package | {"setup.py", "pyproject.toml", "LICENSE"} <= names


def names_in(lines: Iterable[str]) -> set[str]:
    """Package names in a list of requirements."""
    found = (re.match(r"[\w-]+", line) for line in lines)
    return {one[0] for one in found if one is not None and one[0] != "transformer_kernels"}


def listed(name: str) -> set[str]:
    """Package names in requirements/<name>.txt and the lists it includes."""
    lines = (ROOT / f"requirements/{name}.txt").read_text().splitlines()
    included = [line.split()[1].removesuffix(".txt") for line in lines if line.startswith("-r ")]
    own = names_in(line for line in lines if not line.startswith("-"))
    return own.union(*map(listed, included))


def test_requirement_lists_match_the_extras_and_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = {name: names_in(x) for name, x in project["project"]["optional-dependencies"].items()}
    build, torch = names_in(project["build-system"]["requires"]), {"torch"}
    assert listed("demo") == build | torch | extras["train"]
    assert listed("test") == listed("demo") | extras["test"] | extras["bench"]
    assert listed("wheel") == listed("demo") | extras["wheel"]
    assert listed("test-all") == listed("test") | listed("wheel") | extras["test-all"]
    assert listed("lint") == listed("test-all") | extras["lint"]
    assert listed("docs") == extras["docs"]
    lines = (ROOT / "requirements/versions.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert listed("lint") | listed("docs") <= pinned
