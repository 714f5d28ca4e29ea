"""Tile sizes for each chip, kernel, element size and width.

Each tile is the largest tried that fits the chip's shared memory and spills no registers inside its
loops, according to the compiler (`python -m transformer_kernels tiles`). Larger tiles read q, k and
v fewer times; 8 warps have twice the registers of 4. Exception: float32 from width 128 on mostly
spills, and its tiles are a compromise.

Some tiles of sm90 are the fastest of several on an H200 (docs/triton.md). `python -m
benchmarks.tuning triton` times all that fit on the GPU of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from ...masks.resolved import BLOCK_MASK_SIZE

Kernel = Literal[
    "forward", "decode", "bwd_dkdv", "bwd_dq", "bias_gradient", "relative_gradient",
    "keys_forward", "keys_dkdv", "keys_dq", "keys_gradient",
]  # fmt: skip
WITH_KEYS: dict[Kernel, Kernel] = {
    "forward": "keys_forward",
    "bwd_dkdv": "keys_dkdv",
    "bwd_dq": "keys_dq",
}
"""Kernels that have other tiles in calls with relative keys."""
SQUARE: tuple[Kernel, ...] = ("relative_gradient", *WITH_KEYS.values(), "keys_gradient")
"""Kernels with square tiles, each within one block of the block mask."""
SUMS: tuple[Kernel, ...] = ("bias_gradient", "relative_gradient", "keys_gradient")
"""Kernels that sum score gradients."""
CONVERSION_BYTES = 4096
"""Shared memory, at most, in which the compiler converts the layouts of options' loads."""
WIDTHS = (64, 128, 256, 512)
"""Widths (head dimensions) of the table's columns. A row uses the first that is large enough."""


@dataclass(frozen=True)
class Tile:
    """Tile of scores that one program computes, with its launch parameters."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    """software pipeline stages; each has its own shared-memory buffer"""


@dataclass(frozen=True)
class Chip:
    """GPU family that shares one table of tiles."""

    name: str
    shared_kib: int
    """shared memory of one program"""
    warp_groups: bool = False
    """True if matrix products read their operands from shared memory (wgmma, tcgen05)"""
    keeps_weights: bool = False
    """True if half-precision tiles between two products stay in registers when each warp owns whole
    rows"""
    keeps_rows: bool = False
    """True if rows used by all iterations stay in registers instead of shared memory"""
    multiplies_float32: bool = False
    """True if the matrix units multiply float32 natively"""


CHIPS = {
    "sm80": Chip("sm80", 163, keeps_weights=True),
    # Also serves sm_89 and sm_120: consumer chips have less shared memory.
    "sm86": Chip("sm86", 99, keeps_weights=True),
    "sm90": Chip("sm90", 227, warp_groups=True, keeps_weights=True),
    "sm100": Chip("sm100", 227, warp_groups=True),
    "gfx9": Chip("gfx9", 64, keeps_rows=True, multiplies_float32=True),
}


def chip_of(capability: tuple[int, int]) -> Chip:
    """Returns the family of an NVIDIA GPU with this compute capability."""
    major, minor = capability
    if major >= 12 or (major == 8 and minor > 0):
        return CHIPS["sm86"]
    return CHIPS["sm80" if major == 8 else "sm90" if major == 9 else "sm100"]


def width(columns: int) -> int:
    """Returns the tile width for rows of `columns` elements: a power of 2, at least 16 (the
    smallest dimension of the matrix units)."""
    return max(16, 1 << (columns - 1).bit_length())


def widths(D: int, D_v: int) -> tuple[int, int]:
    """Returns the tile widths of k and of v: neither is below the other, up to 64.

    ptxas of CUDA 12.8, which Triton 3.6 uses, miscompiled tiles of 16 columns next to wider ones
    for Hopper: docs/triton.md, section 5.
    """
    k, v = width(D), width(D_v)
    return max(k, min(v, 64)), max(v, min(k, 64))


def precision(chip: Chip, columns: int) -> str:
    """Returns the `input_precision` of `tl.dot` for float32.

    "bf16x6" multiplies by six products of bfloat16 parts, as accurate as float32. "ieee" is used
    where the matrix units multiply float32, or where the parts would fill the registers.
    """
    return "ieee" if chip.multiplies_float32 or columns > 256 else "bf16x6"


def tile(
    kernel: Kernel,
    chip: Chip,
    element_size: int,
    columns: int,
    score_bytes: int = 0,
    key_bytes: int = 0,
) -> Tile | None:
    """Returns the tile of a kernel, or None if no tile fits the chip's shared memory.

    Args:
        kernel: name of the kernel.
        chip: GPU family.
        element_size: bytes per element of q, k and v.
        columns: elements per row, the larger of D and D_v.
        score_bytes: bytes loaded per score, for a dense bias, a dense mask and a layout.
        key_bytes: bytes loaded per query or key, for position tests.
    """
    if _override is not None and _override[0] == kernel:
        return _override[1]
    table = (_HALVES if element_size == 2 else _FLOATS)[kernel]
    index = next(n for n, limit in enumerate(WIDTHS) if columns <= limit)
    row = table[chip.name][index]
    if row is None:
        return None
    default = Tile(*row)
    if kernel in SUMS or kernel in SQUARE:  # tiles for any loads of options
        return default
    if score_bytes:
        default = _halved(kernel, chip, default)
    elif not key_bytes:
        return default
    positions = key_bytes * max(default.block_m, default.block_n)

    def needed(tile: Tile) -> int:
        shared = shared_bytes(kernel, chip, tile, element_size, columns, score_bytes)
        return shared + positions * tile.stages + CONVERSION_BYTES

    while default.stages > 1 and needed(default) > 1024 * chip.shared_kib:
        default = replace(default, stages=default.stages - 1)
    return default


def is_allowed(kernel: Kernel, tile: Tile) -> bool:
    """True if the kernel can have the tile, whatever its resources: see `SQUARE`."""
    return kernel not in SQUARE or tile.block_m == tile.block_n <= BLOCK_MASK_SIZE


def _halved(kernel: Kernel, chip: Chip, tile: Tile) -> Tile:
    """Halves the streamed block, because per-score loads take registers."""
    minimum = 64 if kernel == "forward" and chip.warp_groups else 32
    if kernel == "bwd_dkdv":
        return replace(tile, block_m=min(tile.block_m, max(tile.block_m // 2, minimum)))
    return replace(tile, block_n=min(tile.block_n, max(tile.block_n // 2, minimum)))


_override: tuple[Kernel, Tile] | None = None


@contextmanager
def override_tile(kernel: Kernel, tile: Tile) -> Iterator[None]:
    """Context manager that overrides the tile of one kernel. Tuning uses it to compare tiles."""
    global _override
    before, _override = _override, (kernel, tile)
    try:
        yield
    finally:
        _override = before


def shared_bytes(
    kernel: Kernel, chip: Chip, tile: Tile, element_size: int, columns: int, score_bytes: int = 0
) -> int:
    """Returns an upper bound of the shared memory of a tile, in bytes.

    The sum of: resident rows (q; k and v; or q and do), pipelined rows (k and v, q and do, or all;
    relative keys), per-score loads, and tiles passed from one product to the next (weights; for dk
    also ds; a tile by distance).
    """
    row = columns * element_size
    has_keys = kernel in WITH_KEYS.values() or kernel == "keys_gradient"
    kernel = next((plain for plain, other in WITH_KEYS.items() if other == kernel), kernel)
    resident, streamed = 2 * tile.block_m, 2 * tile.block_n
    if kernel == "bwd_dkdv":
        resident, streamed = streamed, resident
    elif kernel in ("forward", "decode"):
        resident = tile.block_m
    elif kernel in SUMS:
        resident, streamed = 0, resident + streamed
    if has_keys:
        streamed += 2 * tile.block_n
    if chip.keeps_rows:
        resident = 0
        if tile.stages == 1:  # one matrix at a time on its way to registers
            streamed = max(tile.block_m, tile.block_n)
        elif kernel == "bwd_dkdv":  # its loops for fused and for large exponents share no buffers
            streamed *= 2
    ahead = max(1, tile.stages - 1)
    # Chips without warp groups copy the current tile to registers, which frees one buffer.
    in_flight = tile.stages if chip.warp_groups else ahead
    scores = tile.block_m * tile.block_n
    rows = tile.block_n if kernel == "bwd_dkdv" else tile.block_m
    between = scores * element_size * ((2 if kernel == "bwd_dkdv" else 1) + has_keys)
    if chip.keeps_weights and element_size == 2 and 16 * tile.warps <= rows:
        between = 0
    return (resident + in_flight * streamed) * row + ahead * scores * score_bytes + between


_Rows = dict[str, tuple[tuple[int, int, int, int] | None, ...]]

# (block_m, block_n, warps, stages) for the widths 64, 128, 256 and 512; None: no tile fits.
# fmt: off
_KEYS = ((32, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1), (16, 16, 4, 1))

_HALVES: dict[Kernel, _Rows] = {
    "forward": {
        "sm80":  ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 1)),
        "sm86":  ((128, 128, 8, 3), (128, 64, 8, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
        "sm90":  ((128, 128, 8, 3), (128, 128, 8, 3), (128, 64, 8, 2), (32, 32, 8, 1)),
        "sm100": ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2), (32, 32, 8, 1)),
        "gfx9":  ((128, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 16, 8, 1)),
    },
    "decode": {
        "sm80":  ((64, 64, 4, 3), (32, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
        "sm86":  ((64, 64, 4, 3), (32, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
        "sm90":  ((64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 3), (16, 16, 4, 2)),
        "sm100": ((64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 3), (16, 16, 4, 2)),
        "gfx9":  ((64, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
    "bwd_dkdv": {
        "sm80":  ((64, 128, 8, 3), (64, 64, 8, 2), (32, 64, 8, 2), (32, 16, 8, 1)),
        "sm86":  ((64, 128, 8, 3), (64, 64, 8, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
        "sm90":  ((64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 8, 2), (32, 16, 8, 1)),
        "sm100": ((64, 128, 8, 3), (32, 128, 8, 3), (32, 64, 8, 2), (32, 16, 8, 1)),
        "gfx9":  ((64, 64, 4, 1), (32, 64, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
    "bwd_dq": {
        "sm80":  ((128, 64, 8, 3), (64, 64, 8, 2), (64, 64, 8, 1), (32, 16, 8, 1)),
        "sm86":  ((128, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 1), (32, 16, 8, 1)),
        "sm90":  ((128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2), (32, 16, 8, 1)),
        "sm100": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 1), (32, 16, 8, 1)),
        "gfx9":  ((128, 64, 8, 2), (64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 8, 1)),
    },
    "bias_gradient": dict.fromkeys(
        CHIPS, ((64, 64, 4, 1), (64, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))
    ),
    "relative_gradient": {
        "sm80":  ((64, 64, 8, 2), (64, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        "sm86":  ((64, 64, 8, 2), (64, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
        "sm90":  ((64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1), (16, 16, 4, 1)),
        "sm100": ((64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1), (16, 16, 4, 1)),
        "gfx9":  ((64, 64, 4, 1), (64, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
    "keys_forward": dict.fromkeys(CHIPS, _KEYS),
    "keys_dkdv": {
        **dict.fromkeys(CHIPS, _KEYS),
        # Triton 3.6 compiles no two stages with all options.
        "gfx9": ((32, 32, 4, 1), (16, 16, 4, 1), *_KEYS[2:]),
    },
    "keys_dq": {
        **dict.fromkeys(CHIPS, _KEYS),
        **dict.fromkeys(("sm90", "sm100"), (_KEYS[0], (32, 32, 4, 1), *_KEYS[2:])),
    },
    "keys_gradient": dict.fromkeys(CHIPS, _KEYS),
}

_FLOAT_KEYS: _Rows = {
    **dict.fromkeys(CHIPS, ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1))),
    **dict.fromkeys(("sm80", "sm86"), ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), None)),
}

_FLOATS: dict[Kernel, _Rows] = {
    "forward": {
        "sm80":  ((128, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "sm86":  ((128, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "sm90":  ((128, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "sm100": ((128, 32, 8, 2), (64, 32, 8, 2), (16, 16, 4, 1), (16, 16, 4, 1)),
        "gfx9":  ((128, 32, 8, 2), (64, 32, 8, 2), (32, 16, 4, 2), (16, 16, 4, 1)),
    },
    "decode": {
        "sm80":  ((32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
        "sm86":  ((32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
        "sm90":  ((32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
        "sm100": ((32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
        "gfx9":  ((32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
    "bwd_dkdv": {
        "sm80":  ((32, 32, 4, 1), (16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
        "sm86":  ((32, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1), None),
        "sm90":  ((32, 64, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
        "sm100": ((32, 64, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
        "gfx9":  ((32, 64, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
    "bwd_dq": {
        "sm80":  ((32, 32, 4, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
        "sm86":  ((32, 32, 4, 1), (32, 32, 8, 1), (16, 16, 8, 1), None),
        "sm90":  ((64, 32, 8, 2), (64, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
        "sm100": ((64, 32, 8, 2), (64, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
        "gfx9":  ((64, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
    "bias_gradient": dict.fromkeys(
        CHIPS, ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 4, 1))
    ),
    "relative_gradient": dict.fromkeys(
        CHIPS, ((32, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1))
    ),
    "keys_forward": _FLOAT_KEYS,
    "keys_dkdv": _FLOAT_KEYS,
    "keys_dq": _FLOAT_KEYS,
    "keys_gradient": _FLOAT_KEYS,
}
# fmt: on
