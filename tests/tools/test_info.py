"""`info()`, with and without the compiled extension."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels.backends import BACKENDS
from transformer_kernels.backends.native import extension
from transformer_kernels.info import Build, Info

MODULE = importlib.import_module("transformer_kernels.info")  # the root has a function of this name
ROOT = Path(__file__).parents[2]
WITHOUT_EXTENSION = """
import sys
sys.modules["transformer_kernels._C"] = None
from transformer_kernels.cli import main
sys.exit(main(["info"]))
"""


def example(build: Build | None = None, missing: tuple[str, ...] = ()) -> Info:
    return Info(
        version="0.1.0",
        python="3.12.1",
        torch="2.11.0",
        triton=None,
        cpu="a CPU",
        threads=2,
        devices=("cpu", "cuda:0 a GPU, sm_90"),
        build=build,
        backends=(),
        fast_path=None,
        missing=missing,
    )


def test_versions_are_those_in_use() -> None:
    found = tk.info()
    assert found.version == tk.__version__
    assert found.torch == torch.__version__
    assert found.python == platform.python_version()
    assert found.threads == torch.get_num_threads()
    assert found.devices[0] == "cpu"
    assert [backend.name for backend in found.backends] == [b.name for b in BACKENDS]


def test_build_describes_the_extension_in_use() -> None:
    from transformer_kernels import _C

    build = tk.info().build
    assert build is not None
    assert build.isas == tuple(_C.built_isas())
    assert build.isas[0] == "portable"
    assert build.isa == _C.isa()
    assert build.isa in build.isas
    assert build.minimum_torch == "2.11"
    assert build.cxx_standard == "C++20"
    assert set(build.cpu_features) == {name for name, has in _C.cpu_features().items() if has}
    assert not any(" kernels" in text for text in tk.info().missing)


def test_unknown_instruction_set_cannot_be_forced() -> None:
    from transformer_kernels import _C

    with pytest.raises(ValueError, match="'sse9'"):
        _C.force_isa("sse9")


def test_info_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().torch = "3"  # type: ignore[misc]


def test_text_aligns_and_labels_each_kind_once() -> None:
    build = Build(
        "gcc 12", "C++20", "2.13.0", "2.11", ("portable", "avx2"), "avx2", ("fma",), "", ()
    )
    assert str(example(build, ("a", "b"))).splitlines() == [
        "transformer_kernels 0.1.0",
        "  Python       3.12.1",
        "  torch        2.11.0, 2 threads",
        "  triton       not installed",
        "  CPU          a CPU",
        "  device       cpu",
        "               cuda:0 a GPU, sm_90",
        "  CPU features fma",
        "  CPU kernels  avx2 in use; built for portable, avx2",
        "  CUDA kernels not built",
        "  built with   gcc 12, C++20, torch 2.13.0; runs on torch 2.11 and later",
        "  fast path    on",
        "  missing      a",
        "               b",
    ]
    assert str(example()).splitlines()[-1] == "  missing      nothing"


def test_missing_extension_has_install_instructions() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTENSION], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "kernels      not built" in result.stdout
    assert "install a C++ compiler (Debian, Ubuntu: apt install g++)" in result.stdout
    assert "reference: available" in result.stdout


def test_extension_that_fails_to_load_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "unavailable_reason", lambda: "undefined symbol: foo")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found = tk.info()
    assert found.build is None
    assert found.backends[0].reason == "undefined symbol: foo"
    (missing,) = (line for line in found.missing if "do not load" in line)
    assert "undefined symbol: foo" in missing


def test_missing_extras_have_install_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "TRAIN_PACKAGES", ("torch", "no_such_package"))
    assert tk.info().missing[-1] == (
        "no_such_package, for progress bars, pictures and published weights: "
        "pip install 'transformer_kernels[train]'"
    )


def test_cpu_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(MODULE, "CPUINFO", cpuinfo)
    assert tk.info().cpu == platform.machine()
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast 9000\n")
    assert tk.info().cpu == f"Fast 9000, {platform.machine()}"
