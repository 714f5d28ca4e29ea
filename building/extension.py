"""setuptools' build_ext: which units there are, and what is said about them."""

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
from building.tools import Torch, find_compiler, find_pybind11, find_torch, missing_tools
from building.unit import Unit

ROOT = Path(__file__).resolve().parents[1]

# torch is loaded with its symbols private, so _C must name the libraries it takes them from.
# libtorch.so has no code of its own: it stands for whichever of libtorch_cpu, libtorch_cuda the
# installed torch has. No rpath: `import torch` has loaded them all before _C is imported.
LINK_FLAGS = (
    "-shared",
    *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-Wl,--no-as-needed",)),
    "-ltorch",
    "-ltorch_cpu",
)


def announce(text: str) -> None:
    """Print, past pip too: pip shows a build's output only with -v, so write to its terminal."""
    print(text, flush=True)
    if "setuptools.build_meta" in sys.modules and not sys.stdout.isatty():
        try:
            Path("/dev/tty").write_text(f"\n{text}\n")
        except OSError:
            return  # nobody is watching


def units(machine: str, torch: Torch, pybind11: str, cuda: CudaBuild | None) -> tuple[Unit, ...]:
    """Every object of the extension, in link order."""
    if cuda is None:
        return host_units(machine, torch, pybind11)
    return (*host_units(machine, torch, pybind11, cuda.definitions), *cuda_units(torch, cuda.chips))


def toolchain(compiler: tuple[str, ...], torch: Torch, cuda: CudaBuild | None) -> Toolchain:
    link_flags = (f"-L{torch.root / 'lib'}", *LINK_FLAGS)
    if cuda is None:
        return Toolchain(compiler, COMMON_FLAGS, link_flags)
    return Toolchain(compiler, COMMON_FLAGS, (*link_flags, *cuda.link_flags), cuda.nvcc(compiler))


class BuildExtension(build_ext):
    """setuptools' build_ext with ninja in place of its own compiler driver."""

    def run(self) -> None:
        if missing := missing_tools(os.environ, Path(sysconfig.get_path("include"))):
            self.extensions = []
            announce(
                "transformer_kernels: the compiled kernels were not built.\n"
                '  built:     the Python package; attention runs in plain torch, "reference"\n'
                '  not built: CPU kernels, "cpu"; CUDA kernels, "cuda"\n'
                "  to build them, install transformer_kernels again after installing\n"
                + "\n".join(f"    - {tool}" for tool in missing)
            )
        super().run()

    def build_extension(self, extension: Extension) -> None:
        start = time.monotonic()
        compiler, torch = find_compiler(os.environ), find_torch()
        found = _find_cuda(torch)
        cuda = found if isinstance(found, CudaBuild) else None
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        folder = f"build/extension{suffix.removesuffix('.so')}"
        output = f"{folder}/_C{suffix}"
        objects = units(platform.machine(), torch, find_pybind11(), cuda)
        jobs = job_count(os.environ, available_cores(), memory_gib(), GIB_A_JOB["nvcc"])
        text = ninja_file(objects, toolchain(compiler, torch, cuda), folder, output, jobs)
        hint = f"\nwithout CUDA kernels: {ARCH_LIST}=none" if cuda else ""
        run_ninja(ROOT, folder, text, hint=hint)

        target = self.get_ext_fullpath(extension.name)
        self.mkpath(str(Path(target).parent))
        self.copy_file(str(ROOT / output), target)
        announce(
            f"transformer_kernels: built _C{suffix} in {time.monotonic() - start:.1f} s, "
            f"with {shlex.join(compiler)} against torch {torch.version}\n"
            + "\n".join(report(platform.machine(), found))
        )


def _find_cuda(torch: Torch) -> CudaBuild | NoCudaError:
    try:
        return find_cuda(os.environ, torch)
    except NoCudaError as reason:
        return reason


def report(machine: str, cuda: CudaBuild | NoCudaError) -> list[str]:
    """Lines that say what was built, what was not, and what to set for another choice."""
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
    if chips.passed_over:
        old = ", ".join("sm_{}{}".format(*one) for one in chips.passed_over)
        lines.append(f"  not built: CUDA kernels for {old}: they need sm_80 or later")
    lines.append(f'             for other chips: set {ARCH_LIST}="8.0;9.0+PTX"; for none, "none"')
    return lines
