"""The compiled extension. Its operators are torch.ops.transformer_kernels.*; these are the rest."""

from typing import Literal, TypedDict

class BuildInfo(TypedDict):
    compiler: str
    cxx_standard: str
    torch: str
    minimum_torch: str
    isas: list[str]
    cuda_architectures: list[str]

def build_info() -> BuildInfo:
    """How this extension was built."""

def cpu_features() -> dict[str, bool]:
    """The CPU features that decide which kernels may run here, and whether this CPU has them."""

def built_isas() -> list[str]:
    """The instruction sets that kernels were compiled for, ascending."""

def isa() -> str:
    """The instruction set in use."""

def force_isa(name: Literal["auto", "portable", "avx2", "avx512"] | str, /) -> None:
    """Use one instruction set, or "auto" for the best.

    Raises ValueError if it was not built or this CPU lacks it.
    """
