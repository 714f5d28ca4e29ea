"""The CPU extension under AddressSanitizer and UndefinedBehaviorSanitizer, for child processes.

A parent process calls `build` and starts a child with `environment`; the child calls
`libraries.install_extension` before it imports transformer_kernels. A fault is reported on stderr
and ends the child by SIGABRT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools.errors import PlatformError

from building.sanitized import find_library, find_runtime, toolchain
from building.tools import find_compiler, find_torch
from tests.support import libraries


def unavailable_reason() -> str | None:
    """The reason why the sanitized extension cannot be built and run, or None if it can."""
    if sys.platform != "linux":
        return "the runtime of the sanitizers is preloaded as on Linux"
    try:
        find_runtime(find_compiler(os.environ))
    except PlatformError as reason:
        return str(reason)
    return None


def build() -> Path:
    """Builds the extension if it is outdated."""
    tools = toolchain(find_compiler(os.environ), find_torch())
    return libraries.build_extension("build/sanitized/_C.so", tools, "the sanitized extension")


def environment() -> dict[str, str]:
    """Environment variables of a child process that loads the extension."""
    compiler = find_compiler(os.environ)
    # Python is linked neither to the runtime, which must be loaded first, nor to the C++ library,
    # whose __cxa_throw the runtime looks up at the start.
    libraries = (find_runtime(compiler), find_library(compiler, "libstdc++.so.6"))
    return {
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path is not None),
        # Leaks: Python keeps memory to its end. Null for an absurd size: torch then raises.
        "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1",
        # Without Python's own allocator, uses of freed objects are detected.
        "PYTHONMALLOC": "malloc",
        # The emulator switches stacks, which AddressSanitizer does not follow.
        "TRANSFORMER_KERNELS_EMULATOR": "0",
    }
