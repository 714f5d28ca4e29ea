"""The CPU extension under AddressSanitizer and UndefinedBehaviorSanitizer: flags and runtime."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from setuptools.errors import PlatformError

from building.extension import LINK_FLAGS
from building.host import COMMON_FLAGS
from building.ninja import Toolchain
from building.tools import Torch

# A conversion to an integer type that cannot hold the value is undefined, so float-cast-overflow is
# included. float-divide-by-zero is not: the result is infinite or NaN, and kernels use both.
SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
FLAGS = (
    *SANITIZERS,
    "-O1",  # compiles in a third of the time of -O2; the kernels take up to three times as long
    "-g1",  # line numbers in reports
    "-fno-omit-frame-pointer",  # complete stack traces
)
CLANG_RUNTIMES = (f"libclang_rt.asan-{platform.machine()}.so", "libclang_rt.asan.so")


def toolchain(compiler: tuple[str, ...], torch: Torch) -> Toolchain:
    """Commands and flags. Raises PlatformError if the compiler has no sanitizer runtime."""
    is_clang = find_runtime(compiler).name in CLANG_RUNTIMES
    shared = ("-shared-libasan",) if is_clang else ()
    flags = (*COMMON_FLAGS, *FLAGS)  # a compiler uses the last of contradicting flags
    link_flags = (*SANITIZERS, *shared, f"-L{torch.root / 'lib'}", *LINK_FLAGS)
    return Toolchain(compiler, flags, link_flags)


def find_runtime(compiler: tuple[str, ...]) -> Path:
    """The runtime library of AddressSanitizer. Raises PlatformError if the compiler has none."""
    # Clang also finds the library of GCC, so the names of Clang come first.
    for name in (*CLANG_RUNTIMES, "libasan.so"):
        if (path := find_library(compiler, name)) is not None:
            return path
    raise PlatformError(
        f"{' '.join(compiler) or 'no C++ compiler'}: AddressSanitizer's shared library is missing "
        "(Debian, Ubuntu: part of g++; Fedora: dnf install libasan libubsan)"
    )


def find_library(compiler: tuple[str, ...], name: str) -> Path | None:
    """Path of a shared library that the compiler links, or None."""
    if not compiler:
        return None
    command = [*compiler, f"-print-file-name={name}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    path = Path(result.stdout.strip())
    return path.resolve() if path.is_absolute() else None  # a name not found is printed as it is
