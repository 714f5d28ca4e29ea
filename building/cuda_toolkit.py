"""Detection of the CUDA toolkit."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from setuptools.errors import PlatformError

MINIMUM_CUDA = (12, 1)
"""The first version whose nvcc compiles C++20 and whose PTX has vectorised red of four floats."""

INSTALL_CUDA = "install a CUDA toolkit, {}.{} or later, or set CUDA_HOME".format(*MINIMUM_CUDA)


class NoCudaError(Exception):
    """The reason why no CUDA kernels are built, and the remedy."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class Toolkit:
    """An installed CUDA toolkit."""

    nvcc: str
    home: Path
    """The folder that contains include/cuda.h."""
    version: str
    codes: frozenset[str]
    """Targets that nvcc supports: sm_80, compute_80, ..."""

    @property
    def runtime(self) -> Path:
        """Path of the static CUDA runtime."""
        name = "libcudart_static.a"
        places = (self.home / "lib64", self.home / "lib", *self.home.glob("targets/*/lib"))
        for place in places:
            if (place / name).is_file():
                return place / name
        raise PlatformError(f"{name} is not in {self.home}: install the development files of CUDA")


def find_toolkit(environ: Mapping[str, str]) -> Toolkit:
    """Finds the toolkit in CUDA_HOME, else in CUDA_PATH, else by nvcc on PATH.

    Raises NoCudaError if there is none or it is too old, PlatformError if CUDA_HOME or CUDA_PATH
    names a folder without nvcc.
    """
    nvcc, home = _find_nvcc(environ)
    release = re.search(r"release (\d+)\.(\d+)", _output(nvcc, "--version"))
    if release is None:
        raise PlatformError(f"{nvcc} --version does not print a release")
    version = ".".join(release.groups())
    if tuple(map(int, release.groups())) < MINIMUM_CUDA:
        minimum = ".".join(map(str, MINIMUM_CUDA))
        raise NoCudaError(
            f"CUDA {version} in {home} is too old: {minimum} or later is needed", INSTALL_CUDA
        )
    return Toolkit(nvcc, home, version, frozenset(_output(nvcc, "--list-gpu-code").split()))


def _find_nvcc(environ: Mapping[str, str]) -> tuple[str, Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := environ.get(variable):
            home = Path(folder)
            if not (home / "bin/nvcc").is_file():
                raise PlatformError(f"{variable} is {folder!r}, which has no bin/nvcc")
            return str(home / "bin/nvcc"), home
    nvcc = shutil.which("nvcc", path=environ.get("PATH", ""))
    if nvcc is None:
        raise NoCudaError("no nvcc on PATH, and CUDA_HOME and CUDA_PATH are not set", INSTALL_CUDA)
    return nvcc, _home_of(nvcc)


def _home_of(nvcc: str) -> Path:
    """The toolkit of an nvcc on PATH, which may be a link, or a script that calls the real nvcc."""
    told = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-x", "cu", "/dev/null"), re.M)
    places = [Path(told[1].strip())] if told else []
    for home in (*places, Path(nvcc).resolve().parents[1]):
        if (home / "include/cuda.h").is_file():
            return home.resolve()
    raise NoCudaError(f"{nvcc} is found, but its include/cuda.h is missing", "set CUDA_HOME")


def _output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise PlatformError(f"{shlex.join(command)} failed: {result.stderr.strip()}")
    return result.stdout + result.stderr
