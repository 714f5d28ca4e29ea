"""Writes build.ninja and runs ninja."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from setuptools.errors import CompileError, PlatformError

from building.tools import find_ninja
from building.unit import Unit

GIB_A_JOB = {"c++": 1, "nvcc": 4}
"""Peak memory of one compiler process, in GiB."""

# Filters `ptxas -v` down to warnings. The complete output is kept for the tests of spills.
_SHOWN = r"grep -Ev '^ptxas info|^ *[0-9]+ bytes (stack frame|gmem)|^$$' $out.ptxas"


@dataclass(frozen=True)
class Toolchain:
    """Commands of the compilers, and the link flags."""

    cxx: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    nvcc: tuple[str, ...] = ()
    """nvcc with its flags. Empty if no unit needs it."""


def job_count(
    environ: Mapping[str, str], cores: int, memory_gib: float, gib_a_job: float = 1
) -> int:
    """Number of parallel jobs: MAX_JOBS if set, else one per core, limited by memory."""
    if text := environ.get("MAX_JOBS"):
        if not text.isdecimal() or int(text) < 1:
            raise PlatformError(f"MAX_JOBS is {text!r}; expected a whole number of at least 1")
        return int(text)
    return max(1, min(cores, int(memory_gib / gib_a_job)))


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gib() -> float:
    """Physical memory in GiB, or the memory limit of the container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total / 2**30


def ninja_file(
    units: Sequence[Unit], tools: Toolchain, folder: str, output: str, nvcc_jobs: int = 1
) -> str:
    """The text of build.ninja. Headers are tracked by dependency files of the compilers."""
    objects = {f"{folder}/{unit.object_name}": unit for unit in units}
    return libraries_file({output: list(objects)}, objects, tools, folder, nvcc_jobs)


def libraries_file(
    libraries: Mapping[str, Sequence[str]],
    units: Mapping[str, Unit],
    tools: Toolchain,
    folder: str,
    nvcc_jobs: int = 1,
) -> str:
    """The text of build.ninja for several libraries.

    Args:
        libraries: Paths of the objects of each library, in link order, by its path. Those that are
            not in `units` exist already.
        units: Units by the paths of their objects.
        tools: Commands of the compilers.
        folder: Folder of ninja's own files.
        nvcc_jobs: Number of processes of nvcc.
    """
    lines = [f"builddir = {folder}", *_cxx_rules(tools)]
    if any(unit.compiler == "nvcc" for unit in units.values()):
        lines += _nvcc_rule(tools, nvcc_jobs)
    for path, unit in units.items():
        rule = "compile" if unit.compiler == "c++" else "compile_cuda"
        lines += [
            f"build {path}: {rule} {unit.source}",
            f"  flags = {_escape(shlex.join(unit.flags))}",
            f"  variant = {unit.variant}",
        ]
    lines += [f"build {output}: link {' '.join(paths)}" for output, paths in libraries.items()]
    return "\n".join(lines) + "\n"


def _cxx_rules(tools: Toolchain) -> list[str]:
    command = shlex.join([*tools.cxx, *tools.cxx_flags])
    return [
        "rule compile",
        f"  command = {_escape(command)} $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in $variant",
        "rule link",
        f"  command = {_escape(shlex.join(tools.cxx))} $in -o $out "
        f"{_escape(shlex.join(tools.link_flags))}",
        "  description = link $out",
    ]


def _nvcc_rule(tools: Toolchain, jobs: int) -> list[str]:
    return [
        "pool nvcc",
        f"  depth = {jobs}",
        "rule compile_cuda",
        f"  command = {_escape(shlex.join(tools.nvcc))} $flags -MD -MF $out.d -c $in -o $out "
        f"> $out.ptxas 2>&1; status=$$?; {_SHOWN}; exit $$status",
        "  depfile = $out.d",
        "  deps = gcc",
        "  pool = nvcc",
        "  description = compile $in $variant",
    ]


def _escape(text: str) -> str:
    return text.replace("$", "$$")


def run_ninja(root: Path, folder: str, text: str, *, hint: str = "", quiet: bool = False) -> None:
    """Writes build.ninja into `folder` and runs ninja. Raises CompileError if the build fails.

    Args:
        root: Root of the project; commands run there.
        folder: Build folder, relative to `root`.
        text: Contents of build.ninja.
        hint: Text appended to the error message.
        quiet: True to show only messages of the compilers.
    """
    path = root / folder / "build.ninja"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    jobs = job_count(os.environ, available_cores(), memory_gib())
    command = [find_ninja(), "-f", f"{folder}/build.ninja", "-j", str(jobs)]
    if quiet:
        command.append("--quiet")
    if subprocess.run(command, cwd=root, check=False).returncode != 0:
        raise CompileError(
            f"the extension did not compile; see the messages of the compiler above{hint}"
        )
