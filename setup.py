"""Builds transformer_kernels._C with ninja: one shared object, every source with its own flags.

Without a C++ compiler the package installs as plain Python and says what it lacks. A compiler that
is there and fails is an error. MAX_JOBS and CXX are honoured.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 11)

# Not -ffast-math: NaN, infinity and the order of sums belong to the operator's contract.
COMMON_FLAGS = (
    "-std=c++20",  # the language of the kernels; torch's headers ask for C++17 or later
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",  # nothing of ours is exported but the module's entry point
    "-ffp-contract=fast",  # multiply-add as one instruction; -std=c++20 alone turns it off
    "-fno-math-errno",  # nothing reads errno, and setting it keeps sqrt and friends scalar
    "-fno-trapping-math",  # nothing traps, and vector code may compute lanes it throws away
    "-Wall",
    "-Wextra",
)

# torch is loaded with its symbols private, so _C must name the libraries it takes them from.
# libtorch.so has no code of its own: it stands for whichever of libtorch_cpu, libtorch_cuda the
# installed torch has. No rpath: `import torch` has loaded them all before _C is imported.
LINK_FLAGS = (
    "-shared",
    *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-Wl,--no-as-needed",)),
    "-ltorch",
    "-ltorch_cpu",
)

EVERY_MACHINE: frozenset[str] = frozenset()
X86_64 = frozenset({"x86_64", "AMD64"})


@dataclass(frozen=True)
class Isa:
    """An instruction set for which csrc/cpu/kernels.cpp is compiled; chosen at run time."""

    name: str
    flags: tuple[str, ...]
    machines: frozenset[str]


# Ascending, and so are the objects on the link line: of an inline function that several of them
# carry the linker keeps the first, which must run on every machine.
AVX512_FLAGS = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "-mprefer-vector-width=512",  # compilers default to 256 bits
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 means its own immintrin.h
)
ISAS = (
    Isa("portable", (), EVERY_MACHINE),
    Isa("avx2", ("-mavx2", "-mfma", "-mf16c"), X86_64),
    Isa("avx512", AVX512_FLAGS, X86_64),
    Isa("amx", (*AVX512_FLAGS, "-mamx-tile", "-mamx-bf16"), X86_64),
)


@dataclass(frozen=True)
class Unit:
    """One object file: a source, the flags that it alone gets, and what tells it from its like."""

    source: str
    flags: tuple[str, ...] = ()
    variant: str = ""

    @property
    def object_name(self) -> str:
        return f"{Path(self.source).stem}{f'-{self.variant}' if self.variant else ''}.o"


@dataclass(frozen=True)
class Torch:
    """The torch to build against, found without importing it."""

    version: str
    root: Path


def isas_for(machine: str) -> tuple[Isa, ...]:
    return tuple(isa for isa in ISAS if not isa.machines or machine in isa.machines)


def units(machine: str, torch: Torch, pybind11_include: str) -> tuple[Unit, ...]:
    """Every object of the extension, in link order. CUDA sources will join here."""
    isas = isas_for(machine)
    minimum = ".".join(map(str, MINIMUM_TORCH))
    major, minor = MINIMUM_TORCH
    python = ("-isystem", sysconfig.get_path("include"))
    stable_abi = (
        *("-isystem", str(torch.root / "include")),
        # The oldest torch whose stable ABI may be used: the build runs on any later one.
        f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000",
    )
    return (
        Unit(
            "csrc/module.cpp",
            (
                *(*python, "-isystem", pybind11_include),
                f'-DTK_TORCH_VERSION="{torch.version}"',
                f'-DTK_MINIMUM_TORCH_VERSION="{minimum}"',
            ),
        ),
        Unit("csrc/direct.cpp", python),
        Unit("csrc/operators.cpp", stable_abi),
        Unit("csrc/call.cpp", stable_abi),
        Unit("csrc/run.cpp"),
        Unit("csrc/varlen.cpp"),
        Unit("csrc/memory.cpp"),
        Unit("csrc/cpu/dispatch.cpp", tuple(f"-DTK_HAVE_{isa.name.upper()}" for isa in isas)),
        *(
            Unit("csrc/cpu/kernels.cpp", (f"-DTK_ISA={isa.name}", *isa.flags), isa.name)
            for isa in isas
        ),
    )


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The C++ compiler's command: CXX if set, else the first of c++, g++, clang++ on PATH.

    Empty if there is none. Raises PlatformError if CXX names a program that is not there.
    """
    path = environ.get("PATH", "")
    if chosen := shlex.split(environ.get("CXX", "")):
        if shutil.which(chosen[0], path=path) is None:
            raise PlatformError(f"CXX is {chosen[0]!r}, which is not on PATH")
        return tuple(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name, path=path):
            return (name,)
    return ()


def missing_tools(environ: Mapping[str, str], python_include: Path) -> list[str]:
    """What must be installed, outside Python, before the extension can be built."""
    missing = []
    if not find_compiler(environ):
        missing.append(
            "a C++ compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; "
            "macOS: xcode-select --install), or CXX set to one"
        )
    if not (python_include / "Python.h").is_file():
        missing.append(
            "Python's C headers (Debian, Ubuntu: apt install python3-dev; "
            "Fedora: dnf install python3-devel)"
        )
    return missing


def find_torch() -> Torch:
    """The installed torch; raises PlatformError if there is none or it is too old."""
    spec = importlib.util.find_spec("torch")
    minimum = ".".join(map(str, MINIMUM_TORCH))
    if spec is None or spec.origin is None:
        raise PlatformError(
            f"torch is needed to build the extension: pip install 'torch>={minimum}'"
        )
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < MINIMUM_TORCH:
        raise PlatformError(f"torch {version} is too old: pip install 'torch>={minimum}'")
    return Torch(version, Path(spec.origin).parent)


def find_pybind11() -> str:
    """The include folder of pybind11; raises PlatformError if it is not installed."""
    spec = importlib.util.find_spec("pybind11")
    if spec is None or spec.origin is None:
        raise PlatformError("pybind11 is needed to build the extension: pip install pybind11")
    return str(Path(spec.origin).parent / "include")


def find_ninja() -> str:
    """Ninja on PATH or beside this Python; raises PlatformError if there is none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
    if (ninja := shutil.which("ninja", path=path)) is None:
        raise PlatformError("ninja is needed to build the extension: pip install ninja")
    return ninja


def job_count(environ: Mapping[str, str], cores: int, memory_gib: float) -> int:
    """MAX_JOBS if set, else one job for each core, as long as each has 1 GiB of memory."""
    if text := environ.get("MAX_JOBS"):
        if not text.isdecimal() or int(text) < 1:
            raise PlatformError(f"MAX_JOBS is {text!r}; expected a whole number of at least 1")
        return int(text)
    return max(1, min(cores, int(memory_gib)))


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gib() -> float:
    """Physical memory, or the container's share of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total / 2**30


def ninja_file(
    units: Sequence[Unit], compiler: Sequence[str], folder: str, output: str, library_path: Path
) -> str:
    """The text of build.ninja. Headers are tracked by the compiler's own dependency files."""
    compile_command = shlex.join([*compiler, *COMMON_FLAGS])
    link_command = shlex.join(compiler)
    link_flags = shlex.join([f"-L{library_path}", *LINK_FLAGS])
    lines = [
        f"builddir = {folder}",
        "rule compile",
        f"  command = {_escape(compile_command)} $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in $variant",
        "rule link",
        f"  command = {_escape(link_command)} $in -o $out {_escape(link_flags)}",
        "  description = link $out",
    ]
    objects = [f"{folder}/{unit.object_name}" for unit in units]
    for unit, path in zip(units, objects, strict=True):
        lines += [
            f"build {path}: compile {unit.source}",
            f"  flags = {_escape(shlex.join(unit.flags))}",
            f"  variant = {unit.variant}",
        ]
    lines.append(f"build {output}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("$", "$$")


def announce(text: str) -> None:
    """Print, past pip too: pip shows a build's output only with -v, so write to its terminal."""
    print(text, flush=True)
    if "setuptools.build_meta" in sys.modules and not sys.stdout.isatty():
        try:
            Path("/dev/tty").write_text(f"\n{text}\n")
        except OSError:
            return  # nobody is watching


class BuildExtension(build_ext):
    """setuptools' build_ext with ninja in place of its own compiler driver."""

    def run(self) -> None:
        if missing := missing_tools(os.environ, Path(sysconfig.get_path("include"))):
            self.extensions = []
            announce(
                "transformer_kernels: the compiled kernels were not built.\n"
                '  built:     the Python package; attention runs in plain torch, "reference"\n'
                '  not built: CPU kernels, "cpu"\n'
                "  to build them, install transformer_kernels again after installing\n"
                + "\n".join(f"    - {tool}" for tool in missing)
            )
        super().run()

    def build_extension(self, extension: Extension) -> None:
        start = time.monotonic()
        compiler, torch = find_compiler(os.environ), find_torch()
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        folder = f"build/extension{suffix.removesuffix('.so')}"
        output = f"{folder}/_C{suffix}"
        objects = units(platform.machine(), torch, find_pybind11())
        _run_ninja(ninja_file(objects, compiler, folder, output, torch.root / "lib"), folder)

        target = self.get_ext_fullpath(extension.name)
        self.mkpath(str(Path(target).parent))
        self.copy_file(str(ROOT / output), target)
        isas = ", ".join(isa.name for isa in isas_for(platform.machine()))
        announce(
            f"transformer_kernels: built _C{suffix} in {time.monotonic() - start:.1f} s, "
            f"with {shlex.join(compiler)} against torch {torch.version}\n"
            f"  built:     CPU kernels for {isas}\n"
            "  not built: CUDA kernels (there are none in this version)"
        )


def _run_ninja(text: str, folder: str) -> None:
    ninja_path = ROOT / folder / "build.ninja"
    ninja_path.parent.mkdir(parents=True, exist_ok=True)
    ninja_path.write_text(text)
    jobs = job_count(os.environ, available_cores(), memory_gib())
    command = [find_ninja(), "-f", f"{folder}/build.ninja", "-j", str(jobs)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise CompileError("the extension did not compile; the compiler's messages stand above")


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("transformer_kernels._C", sources=[])],
        cmdclass={"build_ext": BuildExtension},
    )
