"""Detection of the compiler, torch and ninja, with installation hints if missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from setuptools.errors import PlatformError

MINIMUM_TORCH = (2, 11)


@dataclass(frozen=True)
class Torch:
    """The torch to build against, found without importing it."""

    version: str
    root: Path

    @property
    def runs_cuda(self) -> bool:
        """True for a CUDA build of torch. A CPU build cannot hold CUDA tensors."""
        return (self.root / "lib/libtorch_cuda.so").is_file()


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The command of the C++ compiler: CXX if set, else the first of c++, g++, clang++ on PATH.

    Empty if there is none. Raises PlatformError if CXX names a program that is not on PATH.
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
    """Missing system packages that the build needs, with installation hints."""
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


_VISIBLE_GPUS = """
import torch
for i in range(torch.cuda.device_count()):
    print("gpu", *torch.cuda.get_device_capability(i))
"""


def visible_gpus() -> tuple[tuple[int, int], ...]:
    """Distinct compute capabilities of the GPUs that torch finds, in ascending order.

    CUDA_VISIBLE_DEVICES is honoured. torch is imported in a separate process, so that the build
    holds no CUDA context. Raises PlatformError if torch cannot be imported.
    """
    command = [sys.executable, "-c", _VISIBLE_GPUS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        error = result.stderr.strip().rpartition("\n")[2]
        raise PlatformError(f"torch cannot list the GPUs: {error}")
    lines = (line.split() for line in result.stdout.splitlines() if line.startswith("gpu "))
    return tuple(sorted({(int(major), int(minor)) for _, major, minor in lines}))


def find_ninja() -> str:
    """Ninja on PATH or beside this Python; raises PlatformError if there is none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
    if (ninja := shutil.which("ninja", path=path)) is None:
        raise PlatformError("ninja is needed to build the extension: pip install ninja")
    return ninja
