"""The compiled extension: its Python functions.

Its operators are registered as torch.ops.transformer_kernels.*.
"""

from collections.abc import Callable
from typing import Literal, TypedDict

from torch import Tensor

from .masks.resolved import ResolvedMask
from .problem.layout import Layout
from .scores.options import ScoreOptions

class BuildInfo(TypedDict):
    compiler: str
    cxx_standard: str
    torch: str
    minimum_torch: str
    isas: list[str]
    cuda: str
    """CUDA toolkit version; empty if no CUDA kernels are built."""
    cuda_architectures: list[str]
    """Compiled architectures, for example sm_80. sm_90a denotes the kernels of csrc/cuda/sm90;
    compute_86 denotes PTX, which the driver compiles for later GPUs."""

def build_info() -> BuildInfo:
    """Returns the build configuration of this extension."""

def cpu_features() -> dict[str, bool]:
    """Maps each CPU feature that selects a kernel to True if this CPU has it."""

def built_isas() -> list[str]:
    """Returns the compiled instruction sets in ascending order."""

def isa() -> str:
    """Returns the instruction set in use."""

def force_isa(name: Literal["auto", "portable", "avx2", "avx512"] | str, /) -> None:
    """Selects an instruction set; "auto" selects the best one.

    Raises ValueError if it is not compiled or this CPU does not support it.
    """

FIELDS: tuple[tuple[str, str, str, str], ...]
LINEAR_FIELDS: tuple[tuple[str, str, str, str], ...]
"""Name, kind, shape and layouts of every field, in the operators' order (csrc/common/fields.h)."""

CUDA_WIDTHS: tuple[int, ...]
CUDA_LINEAR_WIDTHS: tuple[int, ...]
"""Tile widths (head dimensions) of the CUDA kernels, ascending (csrc/cuda/common/tile_config.h)."""

LARGE_SHARED_CHIPS: tuple[int, ...]
"""Compute capabilities with at least 163 KiB of shared memory per CTA; 80 means 8.0."""

def direct_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    mask: ResolvedMask,
    layout: Layout,
    block_mask: Tensor | None,
    grouped: bool,
    o: Tensor,
    row_stats: Tensor | None,
    runs: bool,
    /,
) -> str | None:
    """Writes o, and block_mask and row_stats if given. Returns the reason if it declines the call,
    with nothing written. With `runs=False` nothing is written in any case. Packed sequences are not
    supported."""

def direct_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    mask: ResolvedMask,
    layout: Layout,
    block_mask: Tensor | None,
    o: Tensor,
    row_stats: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    /,
) -> str | None:
    """Writes dq, dk and dv. Returns the reason if it declines the call, with nothing written.
    Packed sequences and caches are not supported."""

cuda_functions: tuple[Callable[..., str | None], Callable[..., str | None]]
"""Direct calls of the CUDA kernels; missing if none are built. Both begin with the arguments q, k,
v, scores, mask and layout. The forward call continues with o and row_stats, the backward call with
o, row_stats, do, dq, dk, dv and deterministic. They launch the kernels on the current stream, or
return the reason why they decline the call, with nothing launched."""

def release_workspace() -> None:
    """Frees the workspace that is kept between calls (csrc/common/workspace.h)."""

def want_poison(wanted: bool, /) -> None:
    """Enables or disables filling outputs and workspace with NaN before use; for tests."""

def poisoned_bytes() -> int:
    """Returns the number of bytes filled with NaN so far."""
