"""The build_ext command: units, compiler flags, and the report of what was built."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from building.chips import ARCH_LIST
from building.cuda import CudaBuild, cuda_units, find_cuda
from building.cuda_toolkit import NoCudaError
from building.host import COMMON_FLAGS, host_units, isas_for
from building.ninja import (
    GIB_A_JOB,
    Toolchain,
    available_cores,
    job_count,
    memory_gib,
    ninja_file,
    run_ninja,
)
from building.tools import Torch, find_compiler, find_torch, missing_tools
from building.unit import Unit

ROOT = Path(__file__).resolve().parents[1]

OBJECTS = f"build/objects-{sysconfig.get_platform()}"
"""Folder of the objects, relative to ROOT. Extensions with and without CUDA kernels and the kernels
of building/hub.py share most of them."""

LIBRARY = "_C.abi3.so"
"""File of the extension, for every Python (building/host.py, LIMITED_API)."""

# Python loads the libraries of torch with RTLD_LOCAL, so _C must be linked to them. libtorch.so has
# no code: it depends on libtorch_cpu and, in a CUDA build, libtorch_cuda. No rpath is needed,
# because `import torch` loads them all before _C is imported.
LINK_FLAGS = (
    "-shared",
    *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-Wl,--no-as-needed",)),
    "-ltorch",
    "-ltorch_cpu",
)

EXPORTS = () if sys.platform == "darwin" else ("-Wl,--version-script=building/exports.map",)
"""Link flags of libraries for users, whose symbols must not replace those of other libraries."""


def announce(text: str) -> None:
    """Prints `text`. Under pip, which hides build output, also writes it to the terminal."""
    print(text, flush=True)
    if "setuptools.build_meta" in sys.modules and not sys.stdout.isatty():
        try:
            Path("/dev/tty").write_text(f"\n{text}\n")
        except OSError:
            return  # no terminal


def units(machine: str, torch: Torch, cuda: CudaBuild | None) -> tuple[Unit, ...]:
    """All units of the extension, in link order."""
    if cuda is None:
        return host_units(machine, torch)
    return (*host_units(machine, torch, cuda.definitions), *cuda_units(torch, cuda.chips))


def toolchain(compiler: tuple[str, ...], torch: Torch, cuda: CudaBuild | None) -> Toolchain:
    """Commands of the C++ compiler and nvcc, and the link flags."""
    link_flags = (f"-L{torch.root / 'lib'}", *LINK_FLAGS, *EXPORTS)
    if cuda is None:
        return Toolchain(compiler, COMMON_FLAGS, link_flags)
    return Toolchain(compiler, COMMON_FLAGS, (*link_flags, *cuda.link_flags), cuda.nvcc(compiler))


def nvcc_jobs() -> int:
    """Number of parallel processes of nvcc."""
    return job_count(os.environ, available_cores(), memory_gib(), GIB_A_JOB["nvcc"])


class BuildExtension(build_ext):
    """The build_ext command of setuptools, with ninja instead of its compiler driver."""

    def run(self) -> None:
        if missing := missing_tools(os.environ, Path(sysconfig.get_path("include"))):
            self._remove_earlier_builds()
            self.extensions = []
            announce(
                "transformer_kernels: the compiled kernels were not built.\n"
                '  built:     the Python package; attention runs in plain torch, "reference"\n'
                '  not built: CPU kernels, "cpu"; CUDA kernels, "cuda"\n'
                "  to build them, install transformer_kernels again after installing\n"
                + "\n".join(f"    - {tool}" for tool in missing)
            )
        super().run()

    def _remove_earlier_builds(self) -> None:
        """Removes extensions of earlier builds, which would be installed with the package."""
        for extension in self.extensions:
            Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)

    def build_extension(self, extension: Extension) -> None:
        start = time.monotonic()
        compiler, torch = find_compiler(os.environ), find_torch()
        found = _find_cuda(torch)
        cuda = found if isinstance(found, CudaBuild) else None
        output = f"{OBJECTS}/{LIBRARY}"
        objects = units(platform.machine(), torch, cuda)
        text = ninja_file(objects, toolchain(compiler, torch, cuda), OBJECTS, output, nvcc_jobs())
        hint = f"\nwithout CUDA kernels: {ARCH_LIST}=none" if cuda else ""
        run_ninja(ROOT, OBJECTS, text, hint=hint)

        target = self.get_ext_fullpath(extension.name)
        self.mkpath(str(Path(target).parent))
        for old in Path(target).parent.glob("_C.*.so"):
            old.unlink()  # Python imports a build for one Python before this one
        self.copy_file(str(ROOT / output), target)
        announce(
            f"transformer_kernels: built {LIBRARY} in {time.monotonic() - start:.1f} s, "
            f"with {shlex.join(compiler)} against torch {torch.version}\n"
            + "\n".join(report(platform.machine(), found))
        )


def _find_cuda(torch: Torch) -> CudaBuild | NoCudaError:
    try:
        return find_cuda(os.environ, torch)
    except NoCudaError as reason:
        return reason


def report(machine: str, cuda: CudaBuild | NoCudaError) -> list[str]:
    """Lines that list what was built, what was not built and why, and how to change it."""
    isas = ", ".join(isa.name for isa in isas_for(machine))
    lines = [f"  built:     CPU kernels for {isas}"]
    if isinstance(cuda, NoCudaError):
        return [
            *lines,
            f"  not built: CUDA kernels: {cuda}",
            f"             to build them: {cuda.remedy}",
        ]
    toolkit, chips = cuda.toolkit, cuda.chips
    lines.append(
        f"  built:     CUDA kernels for {', '.join(chips.architectures)}, "
        f"by CUDA {toolkit.version} in {toolkit.home}"
    )
    if chips.too_old:
        old = ", ".join("sm_{}{}".format(*one) for one in chips.too_old)
        lines.append(f"  not built: CUDA kernels for {old}: they need sm_80 or later")
    lines.append(f'             for other chips: set {ARCH_LIST}="8.0;9.0+PTX"; for none, "none"')
    return lines
