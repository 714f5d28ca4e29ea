"""CUDA build: the decision to build CUDA kernels, their chips and their units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from building.chips import ARCH_LIST, NAME_CHIPS, Chips, chips_for, chips_of_gpus, default_chips
from building.cuda_toolkit import NoCudaError, Toolkit, find_toolkit
from building.host import INCLUDE, stable_abi
from building.tile_config import HOPPER_WIDTHS, LINEAR_WIDTHS, RELATIVE_WIDTHS, WIDTHS
from building.tools import Torch, visible_gpus
from building.unit import Unit

ELEMENTS = ("Half", "BFloat16", "float")
"""C++ element types of the kernels of sm80."""

PRODUCTS = {"": ("kPlain", WIDTHS), "relative-": ("kRelative", RELATIVE_WIDTHS)}
"""Prefixes of the names of units of sm80, with their `Products` and widths."""

HOPPER_ELEMENTS = ("Half", "BFloat16")

OPERATORS = "csrc/bindings/cuda_operators.cpp"
LINEAR_OPERATORS = "csrc/bindings/linear_cuda_operators.cpp"

NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    INCLUDE,
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"),
    *("-Xptxas", "-v"),  # registers and spills, written to a file beside the object
)


@dataclass(frozen=True)
class CudaBuild:
    """A CUDA toolkit and the chips to build for."""

    toolkit: Toolkit
    chips: Chips

    def nvcc(self, cxx: Sequence[str]) -> tuple[str, ...]:
        """The command of nvcc, with `cxx` as its host compiler."""
        return (self.toolkit.nvcc, *_host_compiler(cxx), *NVCC_FLAGS)

    @property
    def definitions(self) -> tuple[str, ...]:
        """Preprocessor definitions for build_info()."""
        return (
            f'-DTK_CUDA_VERSION="{self.toolkit.version}"',
            f'-DTK_CUDA_ARCHITECTURES="{" ".join(self.chips.architectures)}"',
        )

    @property
    def link_flags(self) -> tuple[str, ...]:
        """Links the static CUDA runtime with hidden symbols, separate from the runtime of torch."""
        archive = self.toolkit.runtime
        return (str(archive), f"-Wl,--exclude-libs,{archive.name}", "-lrt", "-ldl", "-lpthread")


def _host_compiler(cxx: Sequence[str]) -> tuple[str, ...]:
    launchers = ("ccache", "sccache", "distcc")
    program, *flags = [word for word in cxx if Path(word).name not in launchers]
    options = ("-Xcompiler", ",".join(flags)) if flags else ()
    return ("-ccbin", program, *options)


def find_cuda(environ: Mapping[str, str], torch: Torch) -> CudaBuild:
    """Chooses the CUDA build from `ARCH_LIST`, the installed torch and the visible GPUs.

    Raises NoCudaError if no CUDA kernels are built, PlatformError if a variable is invalid.
    """
    asked = environ.get(ARCH_LIST, "").strip()
    choice = asked.lower()
    if choice == "none":
        raise NoCudaError(f"{ARCH_LIST} is {asked!r}", NAME_CHIPS)
    if choice not in ("", "native"):
        toolkit = find_toolkit(environ)
        return CudaBuild(toolkit, chips_for(asked, toolkit))
    if not torch.runs_cuda:
        raise NoCudaError(f"torch {torch.version} is a CPU build", NAME_CHIPS)
    toolkit = find_toolkit(environ)
    if gpus := visible_gpus():
        return CudaBuild(toolkit, chips_of_gpus(gpus, toolkit))
    if choice == "native":
        raise NoCudaError(f"{ARCH_LIST} is {asked!r}, but torch finds no GPU", NAME_CHIPS)
    return CudaBuild(toolkit, default_chips(toolkit))


def cuda_units(torch: Torch, chips: Chips) -> tuple[Unit, ...]:
    """Units of all CUDA kernels and operators."""
    return (
        Unit(OPERATORS, stable_abi(torch)),
        Unit(LINEAR_OPERATORS, stable_abi(torch)),
        *kernel_units("nvcc", chips.flags, chips.hopper),
        *linear_units("nvcc", chips.flags),
        *(hopper_units("nvcc", chips.hopper_flags) if chips.hopper else ()),
    )


Compiler = Literal["c++", "nvcc"]


def kernel_units(compiler: Compiler, flags: tuple[str, ...], hopper: bool) -> tuple[Unit, ...]:
    """The kernels of sm80, and the dispatcher of all kernels (with those of sm90 if `hopper`)."""
    return (
        Unit("csrc/cuda/dispatch.cu", (*flags, *(("-DTK_SM90",) if hopper else ())), "", compiler),
        *(
            Unit(
                "csrc/cuda/sm80/kernels.cu",
                (
                    *(*flags, f"-DTK_ELEMENT={element}"),
                    *(f"-DTK_WIDTH={width}", f"-DTK_PRODUCTS={products}"),
                ),
                f"{prefix}{element.lower()}-{width}",
                compiler,
            )
            for prefix, (products, widths) in PRODUCTS.items()
            for element in ELEMENTS
            for width in widths
        ),
    )


def linear_units(compiler: Compiler, flags: tuple[str, ...]) -> tuple[Unit, ...]:
    """The kernels of linear attention and their dispatcher."""
    return (
        Unit("csrc/cuda/linear/dispatch.cu", flags, "", compiler),
        *(
            Unit(
                "csrc/cuda/linear/kernels.cu",
                (*flags, f"-DTK_ELEMENT={element}", f"-DTK_WIDTH={width}"),
                f"linear-{element.lower()}-{width}",
                compiler,
            )
            for element in ELEMENTS
            for width in LINEAR_WIDTHS
        ),
    )


def hopper_units(compiler: Compiler, flags: tuple[str, ...]) -> tuple[Unit, ...]:
    """The kernels of csrc/cuda/sm90 and their dispatcher."""
    return (
        Unit("csrc/cuda/sm90/dispatch.cpp"),
        *(
            Unit(
                "csrc/cuda/sm90/kernels.cu",
                (
                    *(*flags, f"-DTK_ELEMENT={element}"),
                    *(f"-DTK_WIDTH={width}", f"-DTK_V_WIDTH={v_width}"),
                ),
                f"{element.lower()}-{width}-{v_width}",
                compiler,
            )
            for element in HOPPER_ELEMENTS
            for width, v_width in HOPPER_WIDTHS
        ),
    )
