"""The compiled extension. Its operators are torch.ops.transformer_kernels.*; these are the rest."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from torch import Tensor

Rows = tuple[int, Sequence[int]]
"""The address and the strides of a tensor whose elements lie side by side"""

class BuildInfo(TypedDict):
    compiler: str
    cxx_standard: str
    torch: str
    minimum_torch: str
    isas: list[str]
    cuda: str
    """The version of CUDA; empty where there are no CUDA kernels."""
    cuda_architectures: list[str]
    """Such as sm_90; sm_90a are the kernels of csrc/cuda/sm90, and compute_86 is code that drivers
    compile for later chips."""

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

CUDA_WIDTHS: tuple[int, ...]
"""Row widths of the CUDA kernels' tiles, ascending (csrc/cuda/common/tile_config.h)"""

LARGE_SHARED_CHIPS: tuple[int, ...]
"""Compute capabilities, 80 for 8.0, with 163 KiB of shared memory a block or more"""

def hopper_widths(
    dtype: int,
    sizes: Sequence[int],
    q: Rows,
    k: Rows,
    v: Rows,
    o: Rows,
    dk: Rows,
    dv: Rows,
    /,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the tiles of q and k, and of v, that csrc/cuda/sm90 has forward and backward.

    For a problem of these sizes (B, H_q, H_kv, M, N, D, D_v); (0, 0) where it does not take the
    pass. dtype counts as in csrc/common/params.h.
    """

def direct_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    diagonal_low: int,
    diagonal_high: int,
    key_start: Tensor | None,
    key_end: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    dense: Tensor | None,
    layout: Tensor | None,
    block_size: int,
    block_mask: Tensor | None,
    scale: float | None,
    grouped: bool,
    o: Tensor,
    lse: Tensor | None,
    /,
) -> bool:
    """Writes o, and block_mask and lse where they are given. False if it declines: then nothing
    has happened."""

def direct_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    diagonal_low: int,
    diagonal_high: int,
    key_start: Tensor | None,
    key_end: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    dense: Tensor | None,
    layout: Tensor | None,
    block_size: int,
    block_mask: Tensor | None,
    scale: float | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    /,
) -> bool:
    """Writes dq, dk and dv. False if it declines: then nothing has happened."""

def direct_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    diagonal_low: int,
    diagonal_high: int,
    scale: float | None,
    o: Tensor,
    /,
) -> bool:
    """Writes o; the diagonals count from the end. False if it declines: then nothing has
    happened."""

def release_workspace() -> None:
    """Free the scratch memory that is kept from call to call (csrc/common/workspace.h)."""

def want_poison(wanted: bool, /) -> None:
    """Whether the operators' outputs and scratch memory start out as NaN; for tests."""

def poisoned_bytes() -> int:
    """How much memory has started out as NaN so far."""
