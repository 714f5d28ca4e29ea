"""Units of the emulated CUDA kernels: libraries for the tests, compiled by the C++ compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from building.cuda import LINEAR_OPERATORS, OPERATORS, hopper_units, kernel_units, linear_units
from building.host import CUDA_FAST_PATH, PYTHON, READERS, stable_abi
from building.tools import Torch
from building.unit import Unit

EMULATOR = "csrc/emulator"
"""The emulator. Its headers take the place of those of the same names in csrc/."""
EMULATOR_OPERATORS = f"{EMULATOR}/bindings/operators.cpp"

FLAGS = (
    *("-iquote", EMULATOR),  # searched before the folders of -I
    "-g1",  # line numbers in error messages
    "-Wno-unknown-pragmas",  # `unroll` is a pragma of nvcc
)
KERNEL_FLAGS = (*FLAGS, "-O1")
"""-O1 compiles in two thirds of the time of -O2 and runs 5% slower, because most of the time is
spent in the emulator itself."""
EMULATOR_FLAGS = (*FLAGS, "-O3")


@dataclass(frozen=True)
class Emulation:
    """Configuration of a library of emulated kernels."""

    arch: int = 800
    """Tile configuration: 800 for chips with 163 KiB of shared memory per block, 860 for 99 KiB.
    800 also includes the kernels for Hopper, which run when a test selects that chip, and those of
    linear attention, which have the same tiles on all chips."""
    races: bool = False
    """True to instrument every memory access, so that the emulator reports data races."""

    @property
    def suffix(self) -> str:
        return ("" if self.arch == 800 else f"_{self.arch}") + ("_races" if self.races else "")

    @property
    def library(self) -> str:
        """Namespace of the operators of the library."""
        return f"transformer_kernels_emulated{self.suffix}"

    @property
    def is_complete(self) -> bool:
        """True if the library has all kernels, not only those whose tiles depend on `arch`."""
        return self.arch == 800

    def units(self, torch: Torch, root: Path) -> tuple[Unit, ...]:
        # The sanitizer's runtime is not linked: the emulator defines the hooks (tsan.cpp).
        sanitizer = ("-fsanitize=thread",) if self.races else ()
        kernels = (*KERNEL_FLAGS, f"-D__CUDA_ARCH__={self.arch}", *sanitizer, "-x", "c++")
        operators = (*KERNEL_FLAGS, *stable_abi(torch), f"-DTK_LIBRARY={self.library}")
        linear = (*linear_units("c++", kernels), Unit(LINEAR_OPERATORS, operators))
        emulator = sorted((root / EMULATOR).glob("*.cpp"))
        return (
            # The emulator comes first: of an inline function in several objects, the linker keeps
            # the first copy, which must not be instrumented.
            *(Unit(str(source.relative_to(root)), EMULATOR_FLAGS) for source in emulator),
            *kernel_units("c++", kernels, self.is_complete),
            *((*hopper_units("c++", kernels), *linear) if self.is_complete else ()),
            *(Unit(source, operators) for source in (OPERATORS, EMULATOR_OPERATORS)),
            # Its functions are exported: the library is no Python module.
            Unit(CUDA_FAST_PATH, (*operators, *PYTHON, "-fvisibility=default")),
            Unit(READERS, PYTHON),
            Unit("csrc/bindings/operator_call.cpp", stable_abi(torch)),
            Unit("csrc/bindings/linear_call.cpp", stable_abi(torch)),
            Unit("csrc/bindings/tensors.cpp", stable_abi(torch)),
            Unit("csrc/common/options.cpp"),
            Unit("csrc/common/workspace.cpp"),
        )
