"""Runs the CUDA kernels on CPU tensors: csrc/cuda compiled for the CPU, with emulated threads.

`install` builds the library in build/ with a C++ compiler. `backend="cuda"` then accepts CPU
tensors. See docs/emulator.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from building.emulated import Emulation
from building.extension import LINK_FLAGS, ROOT
from building.host import COMMON_FLAGS
from building.ninja import Toolchain
from building.tools import find_compiler, find_torch
from tests.support import libraries
from transformer_kernels.backends.native import cuda_support, extension
from transformer_kernels.dispatch import fast_path
from transformer_kernels.dispatch.operators import register_attention
from transformer_kernels.linear.attention import LINEAR
from transformer_kernels.linear.registration import register_compiled


def unavailable_reason() -> str | None:
    """The reason why kernels cannot be emulated, or None if they can."""
    if (unavailable := extension.unavailable_reason()) is not None:
        return unavailable
    if not find_compiler(os.environ):
        return "no C++ compiler on PATH"
    return None


def install() -> None:
    """Builds and loads the emulated kernels for backend="cuda". Raises CompileError on failure."""
    emulate(load(Emulation()))


class _Emulated(cuda_support.Library):
    def reason_against(self, device: torch.device) -> str | None:
        return None


def emulate(namespace: str | None) -> None:
    """Runs CPU tensors on the emulated operators of a namespace; None: on none."""
    if namespace is None:
        cuda_support.libraries.pop("cpu", None)
    else:
        cuda_support.libraries["cpu"] = _Emulated(namespace, _direct_calls.get(namespace))
    fast_path.checked_sizes.cache_clear()  # it remembers which devices have kernels


def emulated_by() -> str | None:
    """The namespace of the emulated operators; None without an emulator."""
    library = cuda_support.libraries.get("cpu")
    return library.namespace if isinstance(library, _Emulated) else None


@contextmanager
def emulation(config: Emulation) -> Iterator[None]:
    """Context in which the backend "cuda" uses the kernels of this configuration."""
    before = emulated_by()
    emulate(load(config))
    try:
        if config.races:
            _operators().report_races(True)
        yield
    finally:
        emulate(before)


@contextmanager
def _set(setting: str, value: int) -> Iterator[None]:
    change = getattr(_operators(), f"set_{setting}")
    before = change(value)
    try:
        yield
    finally:
        change(before or 0)


def schedule(seed: int) -> AbstractContextManager[None]:
    """Context in which `seed` sets the order of lanes, warps and blocks and the delay of copies."""
    return _set("schedule", seed)


def chip(capability: int) -> AbstractContextManager[None]:
    """Context in which kernels are chosen for this compute capability: 80 or 90."""
    return _set("chip", capability)


def aimed_ctas(count: int) -> AbstractContextManager[None]:
    """Context in which launches that divide their work among CTAs aim at so many."""
    return _set("aimed_ctas", count)


def without_kernels() -> AbstractContextManager[None]:
    """Context in which launches do nothing: results are arbitrary, and only the host takes time."""
    return _set("runs_kernels", 0)


def latest_launch() -> str:
    return str(_operators().latest_launch())


def want_poison(wanted: bool) -> None:
    """Enables or disables filling the memory of outputs and workspaces with NaN."""
    for library in _loaded:
        getattr(torch.ops, library).want_poison(wanted)


def poisoned_bytes() -> int:
    return int(_operators().poisoned_bytes())


def _operators() -> Any:
    library = emulated_by()
    assert library is not None, "call install() first"
    return getattr(torch.ops, library)


_loaded: list[str] = []
_direct_calls: dict[str, cuda_support.DirectCalls] = {}
"""Those of loaded libraries, by namespace. None of libraries that report races: direct calls do not
declare the memory that kernels may access."""


@functools.cache
def load(config: Emulation) -> str:
    """Builds the library and registers its operators. Returns their namespace."""
    path = build(config)
    torch.ops.load_library(path)
    if not config.races:
        functions = ctypes.PyDLL(str(path)).tk_cuda_functions
        functions.restype = ctypes.py_object
        _direct_calls[config.library] = functions()
    register_attention(config.library)
    register_compiled(LINEAR, config.library)
    _loaded.append(config.library)
    return config.library


def build(config: Emulation) -> Path:
    output, units = f"{folder(config)}/emulated.so", config.units(find_torch(), ROOT)
    return libraries.build(output, units, toolchain(), "the emulated CUDA kernels")


def folder(config: Emulation) -> str:
    return f"build/emulator{config.suffix}"


def toolchain() -> Toolchain:
    link_flags = (f"-L{find_torch().root / 'lib'}", *LINK_FLAGS, "-ldl")
    return Toolchain(find_compiler(os.environ), COMMON_FLAGS, link_flags)


if __name__ == "__main__":
    build(Emulation())
