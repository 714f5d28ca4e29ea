"""Builds wheels for several Pythons and the source archive: `make wheel`.

    python -m building.wheel [--python python3.13 ...] [--out dist]

The Pythons need only their C headers: setuptools, pybind11, ninja and the torch to compile against
are those of the running Python. All Pythons share the objects that do not include Python.h, so that
each further wheel takes seconds. On Linux, auditwheel replaces the platform tag by the manylinux
tag that the symbols of the extension allow. TORCH_CUDA_ARCH_LIST selects CUDA kernels as in any
other build; a wheel that has them gets a version such as 0.2.0+cu130.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from setuptools.errors import PlatformError

from building.cuda import find_cuda
from building.cuda_toolkit import NoCudaError
from building.extension import ROOT
from building.tools import find_torch

OLDEST_PYTHON = (3, 11)
KNOWN_PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
WORK = ROOT / "build/wheel"
"""Folder of wheels before auditwheel has seen them, and of their contents."""
FROM_TORCH = ("libtorch*.so", "libc10*.so")
"""Libraries that auditwheel must not copy into the wheel: torch has loaded them before."""

_ABOUT = """
import os, sys, sysconfig
print(*sys.version_info[:2])
print(os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))
print(os.path.realpath(sys.executable))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that a wheel can be built for."""

    program: str
    version: tuple[int, int]

    @property
    def tag(self) -> str:
        return "cp{}{}".format(*self.version)


def find_interpreter(program: str) -> Interpreter:
    """The interpreter that a command runs. Raises PlatformError if no wheel can be built for it."""
    try:
        text = subprocess.run([program, "-c", _ABOUT], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PlatformError(f"{program} does not run") from error
    version, has_headers, path = text.stdout.splitlines()
    major, minor = map(int, version.split())
    if (major, minor) < OLDEST_PYTHON:
        raise PlatformError(f"{program} is Python {major}.{minor}; 3.11 or later is needed")
    if has_headers != "True":
        raise PlatformError(f"{program} has no C headers: Python.h")
    return Interpreter(path, (major, minor))


def known_interpreters() -> list[Interpreter]:
    """This Python and those of KNOWN_PYTHONS that are on PATH, one of each version."""
    found: dict[tuple[int, int], Interpreter] = {}
    for program in (sys.executable, *filter(shutil.which, KNOWN_PYTHONS)):
        try:
            interpreter = find_interpreter(program)
        except PlatformError as reason:
            print(f"no wheel: {reason}")
        else:
            found.setdefault(interpreter.version, interpreter)
    return [found[version] for version in sorted(found)]


def cuda_label() -> str:
    """Local version label of a build with CUDA kernels, such as "+cu130"; else empty."""
    try:
        return f"+cu{find_cuda(os.environ, find_torch()).toolkit.version.replace('.', '')}"
    except NoCudaError:
        return ""


def _environ() -> dict[str, str]:
    """Variables for another Python, which then finds this one's packages and its ninja."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    packages = os.pathsep.join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
    return os.environ | {"PATH": path, "PYTHONPATH": packages, "PYTHONWARNINGS": "ignore"}


def _setup(program: str, folder: Path, label: str, *arguments: str) -> None:
    """Runs setup.py, with its own files in `folder`. Raises CalledProcessError on failure."""
    shutil.rmtree(folder, ignore_errors=True)  # a wheel contains what lies there
    folder.mkdir(parents=True)
    command = [program, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    command += [f"--tag-build={label}"] if label else []
    subprocess.run([*command, *arguments], cwd=ROOT, env=_environ(), check=True)


def build_wheel(interpreter: Interpreter, out: Path, label: str = "") -> Path:
    """Builds a wheel into `out`, and on Linux gives it a manylinux tag.

    Args:
        interpreter: the Python it is for.
        out: folder of the wheel; wheels of other names there are kept.
        label: local version label, as `cuda_label` returns it.

    Raises:
        CalledProcessError: setup.py or auditwheel failed; they have printed why.
    """
    folder = WORK / f"{interpreter.tag}{label}"
    build = ("build", "--build-base", str(folder / "build"))
    wheel = ("bdist_wheel", "--skip-build", "--dist-dir", str(folder))
    contents = ("--bdist-dir", str(folder / "contents"))
    _setup(interpreter.program, folder, label, *build, *wheel, *contents)
    (built,) = folder.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    if not sys.platform.startswith("linux"):
        return Path(shutil.copy(built, out))
    repaired = folder / "repaired"
    audit = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--zip-compression-level=9"]
    excluded = [argument for name in FROM_TORCH for argument in ("--exclude", name)]
    command = [*audit, *excluded, "--wheel-dir", str(repaired), str(built)]
    run = subprocess.run(command, env=_environ(), capture_output=True, text=True, check=False)
    if run.returncode:
        print(run.stdout, run.stderr, file=sys.stderr)
        run.check_returncode()
    (wheel_path,) = repaired.glob("*.whl")
    return Path(shutil.copy(wheel_path, out))


def build_source_archive(out: Path) -> Path:
    """Builds the source archive into `out`. Raises CalledProcessError on failure."""
    folder = WORK / "source"
    _setup(sys.executable, folder, "", "sdist", "--dist-dir", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(archive, out))


def build_all(interpreters: Iterable[Interpreter], out: Path) -> list[Path]:
    """Builds the wheels and the source archive."""
    label = cuda_label()
    wheels = [build_wheel(interpreter, out, label) for interpreter in interpreters]
    return [*wheels, build_source_archive(out)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m building.wheel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--python",
        action="append",
        metavar="PROGRAM",
        help=f"a Python to build for; default: this one and {', '.join(KNOWN_PYTHONS)} on PATH",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    options = parser.parse_args(arguments)
    programs = options.python
    try:
        interpreters = list(map(find_interpreter, programs)) if programs else known_interpreters()
        built = build_all(interpreters, options.out.resolve())
    except (PlatformError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    for path in built:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
