"""The units of libraries that tests load: CUDA kernels compiled for the CPU, emulated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from building.cuda import OPERATORS, hopper_units, kernel_units
from building.host import stable_abi
from building.tools import Torch
from building.unit import Unit

FLAGS = (
    "-DTK_EMULATOR",
    "-g1",  # errors tell lines
    "-Wno-unknown-pragmas",  # unroll is nvcc's
)
KERNEL_FLAGS = (*FLAGS, "-O1")
"""A third less to compile than -O2, and 5% slower: the emulator itself takes most of the time."""
EMULATOR_FLAGS = (*FLAGS, "-O3")


@dataclass(frozen=True)
class Emulation:
    """A way to compile the kernels for the emulator."""

    arch: int = 800
    """Whose tiles: 800, for chips with 163 KiB of shared memory a block, or 860, with 99. The first
    also has the kernels for Hopper, which run where a test asks for that chip."""
    races: bool = False
    """Whether the emulator sees every access, and reports those that nothing orders"""

    @property
    def suffix(self) -> str:
        return ("" if self.arch == 800 else f"_{self.arch}") + ("_races" if self.races else "")

    @property
    def library(self) -> str:
        """The namespace of its operators."""
        return f"transformer_kernels_emulated{self.suffix}"

    @property
    def has_hopper(self) -> bool:
        return self.arch == 800

    def units(self, torch: Torch, root: Path) -> tuple[Unit, ...]:
        # No library of the sanitizer's is linked: the emulator has what the compiler calls.
        watched = ("-fsanitize=thread",) if self.races else ()
        kernels = (*KERNEL_FLAGS, f"-DTK_EMULATED_ARCH={self.arch}", *watched, "-x", "c++")
        operators = (*KERNEL_FLAGS, *stable_abi(torch), f"-DTK_LIBRARY={self.library}")
        emulator = sorted((root / "csrc/cuda/emulator").glob("*.cpp"))
        return (
            # First, for of an inline function that several have the linker keeps the first, and the
            # emulator's must not be watched.
            *(Unit(str(source.relative_to(root)), EMULATOR_FLAGS) for source in emulator),
            *kernel_units("c++", kernels, self.has_hopper),
            *(hopper_units("c++", kernels) if self.has_hopper else ()),
            *(
                Unit(source, operators)
                for source in (*OPERATORS, "csrc/bindings/emulator_operators.cpp")
            ),
            Unit("csrc/bindings/tensor_args.cpp", stable_abi(torch)),
            Unit("csrc/bindings/decode_args.cpp", stable_abi(torch)),
            Unit("csrc/common/workspace.cpp"),
        )
