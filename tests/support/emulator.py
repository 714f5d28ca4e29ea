"""The CUDA kernels on CPU tensors: csrc/cuda compiled for the CPU, with emulated threads.

`install` builds the library in build/ with a C++ compiler; `backend="cuda"` then takes CPU tensors.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from building.emulated import Emulation
from building.extension import LINK_FLAGS, ROOT
from building.host import COMMON_FLAGS
from building.ninja import Toolchain, ninja_file, run_ninja
from building.tools import find_compiler, find_torch
from transformer_kernels.backends import schema
from transformer_kernels.backends.native import cuda_support, extension


def impossible_reason() -> str | None:
    """None where kernels can be emulated."""
    if (unavailable := extension.unavailable_reason()) is not None:
        return unavailable
    if not find_compiler(os.environ):
        return "no C++ compiler on PATH"
    return None


def install() -> None:
    """Builds, loads, and lets the backend "cuda" take CPU tensors. CompileError if it fails."""
    cuda_support.emulate(load(Emulation()))


def is_installed() -> bool:
    return cuda_support.emulated_by() is not None


@contextmanager
def emulation(way: Emulation) -> Iterator[None]:
    """Inside it the kernels are those that are compiled in this way."""
    before = cuda_support.emulated_by()
    cuda_support.emulate(load(way))
    try:
        if way.races:
            _operators().report_races(True)
        yield
    finally:
        cuda_support.emulate(before)


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Inside it lanes, warps and blocks run in the order of this seed, and copies arrive by it."""
    operators = _operators()
    operators.set_schedule(seed)
    try:
        yield
    finally:
        operators.set_schedule(0)


@contextmanager
def chip(capability: int) -> Iterator[None]:
    """Inside it kernels are chosen as on a chip of this compute capability: 80, or 90."""
    operators = _operators()
    before = operators.set_chip(capability)
    try:
        yield
    finally:
        operators.set_chip(before)


def latest_launch() -> str:
    """The kernel that was launched last."""
    return str(_operators().latest_launch())


def want_poison(wanted: bool) -> None:
    """Whether memory that the kernels are given starts out as NaN."""
    for library in _loaded:
        getattr(torch.ops, library).want_poison(wanted)


def poisoned_bytes() -> int:
    """How much has started out as NaN so far."""
    return int(_operators().poisoned_bytes())


def _operators() -> Any:
    library = cuda_support.emulated_by()
    assert library is not None, "install() comes first"
    return getattr(torch.ops, library)


_loaded: list[str] = []


@functools.cache
def load(way: Emulation) -> str:
    """The namespace of the operators, which are there from now on."""
    torch.ops.load_library(build(way))
    schema.register_fakes(way.library)
    _loaded.append(way.library)
    return way.library


def build(way: Emulation) -> Path:
    """The library, up to date. One process builds at a time: pytest-xdist has several."""
    found, folder = find_torch(), f"build/emulator{way.suffix}"
    library = ROOT / folder / "emulated.so"
    link_flags = (f"-L{found.root / 'lib'}", *LINK_FLAGS, "-ldl")
    tools = Toolchain(find_compiler(os.environ), COMMON_FLAGS, link_flags)
    library.parent.mkdir(parents=True, exist_ok=True)
    with (ROOT / folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = ninja_file(way.units(found, ROOT), tools, folder, f"{folder}/emulated.so")
        if not library.exists():
            print(f"compiling the CUDA kernels for CPUs, emulated, in {folder}", flush=True)
        run_ninja(ROOT, folder, text, quiet=True)
    return library
