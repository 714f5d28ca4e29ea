"""Units compiled by the C++ compiler: the module, the operators and the CPU kernels."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass

from building.tools import MINIMUM_TORCH, Torch
from building.unit import Unit

READERS = "csrc/bindings/fast_path/readers.cpp"
CUDA_FAST_PATH = "csrc/bindings/cuda_fast_path.cpp"

LIMITED_API = "0x030b0000"
"""The oldest Python whose limited API (PEP 384) may be used. The build runs on any later one."""

PYTHON = ("-isystem", sysconfig.get_path("include"), f"-DPy_LIMITED_API={LIMITED_API}")
"""Compiler flags of a unit that includes headers of Python."""

INCLUDE = "-Icsrc"
"""Includes are relative to csrc/. ninja runs in the root of the project."""

# No -ffast-math: NaN, infinity and the order of sums are part of the operator's contract.
COMMON_FLAGS = (
    INCLUDE,
    "-std=c++20",  # the language of the kernels; torch's headers ask for C++17 or later
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",  # only the entry point of the module is exported
    "-ffp-contract=fast",  # fused multiply-add; -std=c++20 alone disables it
    "-fno-math-errno",  # setting errno prevents vectorisation of sqrt and others
    "-fno-trapping-math",  # vector code may compute lanes that are discarded
    "-Wall",
    "-Wextra",
)

EVERY_MACHINE: frozenset[str] = frozenset()
X86_64 = frozenset({"x86_64", "AMD64"})


WITH_PRODUCTS = ("attention", "linear", "delta")
"""Folders of csrc/cpu whose kernels multiply matrices; those of "conv" do not."""


@dataclass(frozen=True)
class Isa:
    """An instruction set that kernels of csrc/cpu are compiled for."""

    name: str
    flags: tuple[str, ...]
    machines: frozenset[str]
    folders: tuple[str, ...] = (*WITH_PRODUCTS, "conv")


# In ascending order, as are the objects on the link line: of an inline function in several objects
# the linker keeps the first copy, which must run on every machine.
AVX512_FLAGS = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "-mprefer-vector-width=512",  # compilers default to 256 bits
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # false positives in GCC 12's immintrin.h
)
ISAS = (
    Isa("portable", (), EVERY_MACHINE),
    Isa("avx2", ("-mavx2", "-mfma", "-mf16c"), X86_64),
    Isa("avx512", AVX512_FLAGS, X86_64),
    # Attention in bfloat16; the rest is that of avx512.
    Isa("avx512_bf16", (*AVX512_FLAGS, "-mavx512bf16"), X86_64, ("attention",)),
    Isa("amx", (*AVX512_FLAGS, "-mamx-tile", "-mamx-bf16"), X86_64, WITH_PRODUCTS),
)


def isas_for(machine: str) -> tuple[Isa, ...]:
    """Instruction sets that are compiled for this machine."""
    return tuple(isa for isa in ISAS if not isa.machines or machine in isa.machines)


def stable_abi(torch: Torch) -> tuple[str, ...]:
    """Compiler flags of a unit that includes headers of torch."""
    major, minor = MINIMUM_TORCH
    return (
        *("-isystem", str(torch.root / "include")),
        # The oldest torch whose stable ABI may be used. The build runs on any later version.
        f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000",
    )


def host_units(machine: str, torch: Torch, about_cuda: tuple[str, ...] = ()) -> tuple[Unit, ...]:
    """All units except those of CUDA, in link order. `about_cuda`: definitions for build_info()."""
    minimum = ".".join(map(str, MINIMUM_TORCH))
    return (
        Unit(
            "csrc/bindings/module.cpp",
            (
                *PYTHON,
                f'-DTK_TORCH_VERSION="{torch.version}"',
                f'-DTK_MINIMUM_TORCH_VERSION="{minimum}"',
                *about_cuda,
            ),
        ),
        Unit("csrc/bindings/fast_path/functions.cpp", PYTHON),
        Unit(READERS, PYTHON),
        *((Unit(CUDA_FAST_PATH, (*stable_abi(torch), *PYTHON)),) if about_cuda else ()),
        *operator_units(machine, torch),
    )


def operator_units(
    machine: str, torch: Torch, about_library: tuple[str, ...] = (), variant: str = ""
) -> tuple[Unit, ...]:
    """The operators and the CPU kernels, without Python. `about_library`: flags of the operators,
    for a library of this name."""
    isas = isas_for(machine)
    flags = (*stable_abi(torch), *about_library)
    return (
        Unit("csrc/bindings/cpu_operators.cpp", flags, variant),
        Unit("csrc/bindings/conv_operators.cpp", flags, variant),
        Unit("csrc/bindings/linear_operators.cpp", flags, variant),
        Unit("csrc/bindings/delta_operators.cpp", flags, variant),
        Unit("csrc/bindings/operator_call.cpp", stable_abi(torch)),
        Unit("csrc/bindings/linear_call.cpp", stable_abi(torch)),
        Unit("csrc/bindings/tensors.cpp", stable_abi(torch)),
        Unit("csrc/cpu/driver/call.cpp"),
        Unit("csrc/cpu/driver/dense.cpp"),
        Unit("csrc/cpu/driver/relative_gradient.cpp"),
        Unit("csrc/cpu/driver/varlen.cpp"),
        Unit("csrc/cpu/driver/decode.cpp"),
        Unit("csrc/cpu/driver/linear.cpp"),
        Unit("csrc/common/options.cpp"),
        Unit("csrc/common/workspace.cpp"),
        Unit("csrc/common/old_systems.cpp"),
        Unit(
            "csrc/cpu/driver/isa_dispatch.cpp",
            tuple(f"-DTK_HAVE_{isa.name.upper()}" for isa in isas),
        ),
        *(
            Unit(f"csrc/cpu/{folder}/kernels.cpp", (f"-DTK_ISA={isa.name}", *isa.flags), isa.name)
            for isa in isas
            for folder in isa.folders
        ),
    )
