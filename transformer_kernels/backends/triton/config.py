"""Every tile, for each chip, kernel, size of an element and width, with its reason.

No GPU has measured them yet: `python -m transformer_kernels tune` does that. What is known comes
from compiling them (`python -m transformer_kernels tiles`): each is the largest of those tried that
fits the chip's shared memory and moves no registers to memory inside its loops. For float32 from a
width of 128 on most do, and it is a compromise. Larger tiles read q, k and v fewer times; 8 warps
have twice the registers of 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

Kernel = Literal["forward", "bwd_dkdv", "bwd_dq", "bias_gradient"]
WIDTHS = (64, 128, 256, 512)
"""A tile serves the widths up to one of these."""


@dataclass(frozen=True)
class Tile:
    """What one program holds of the scores, and how it is run."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    """loads in flight, each with shared memory of its own"""


@dataclass(frozen=True)
class Chip:
    """A family of GPUs that share a table."""

    name: str
    shared_kib: int
    """for one program"""
    warp_groups: bool = False
    """products read their operands from shared memory"""
    keeps_weights: bool = False
    """tiles between two products stay in registers, where each warp has rows of its own"""
    keeps_rows: bool = False
    """rows that a program uses throughout stay in registers, and take no shared memory"""
    multiplies_float32: bool = False
    """matrix units take it as it is"""


CHIPS = {
    "sm80": Chip("sm80", 163, keeps_weights=True),
    # Also 8.9 and 12.0: consumer chips have less shared memory.
    "sm86": Chip("sm86", 99, keeps_weights=True),
    "sm90": Chip("sm90", 227, warp_groups=True, keeps_weights=True),
    "sm100": Chip("sm100", 227, warp_groups=True),
    "gfx9": Chip("gfx9", 64, keeps_rows=True, multiplies_float32=True),
}


def chip_of(capability: tuple[int, int]) -> Chip:
    """An NVIDIA GPU's family, by its compute capability."""
    major, minor = capability
    if major >= 12 or (major == 8 and minor > 0):
        return CHIPS["sm86"]
    return CHIPS["sm80" if major == 8 else "sm90" if major == 9 else "sm100"]


def width(columns: int) -> int:
    """The tile's columns for rows of this many: a power of 2, 16 at least for matrix units."""
    return max(16, 1 << (columns - 1).bit_length())


def precision(chip: Chip, columns: int) -> str:
    """How float32 is multiplied: by six products of bfloat16 parts, which err like one of float32;
    or as it is, where matrix units take it, or where the parts would fill the registers."""
    return "ieee" if chip.multiplies_float32 or columns > 256 else "bf16x6"


def tile(
    kernel: Kernel, chip: Chip, element_size: int, columns: int, score_bytes: int = 0
) -> Tile | None:
    """The tile that runs, for rows of `columns` elements of `element_size` bytes; None where none
    fits the chip's shared memory. `score_bytes` is what a tile also loads for each score: of a
    dense bias, a dense mask, a layout."""
    if _tried is not None and _tried[0] == kernel:
        return _tried[1]
    rows = (_HALVES if element_size == 2 else _FLOATS)[kernel]
    at = next(n for n, limit in enumerate(WIDTHS) if columns <= limit)
    row = rows[chip.name][at]
    if row is None:
        return None
    shipped = Tile(*row)
    if score_bytes == 0 or kernel == "bias_gradient":  # whose tiles are for a bias as they are
        return shipped
    return _beside_loads(kernel, chip, shipped, element_size, columns, score_bytes)


def _beside_loads(
    kernel: Kernel, chip: Chip, tile: Tile, element_size: int, columns: int, score_bytes: int
) -> Tile:
    """Half the rows of a pass over them, as what is loaded for each score takes registers; and
    fewer loads in flight where those of the tile leave no room."""
    least = 64 if kernel == "forward" and chip.warp_groups else 32
    if kernel == "bwd_dkdv":
        tile = replace(tile, block_m=min(tile.block_m, max(tile.block_m // 2, least)))
    else:
        tile = replace(tile, block_n=min(tile.block_n, max(tile.block_n // 2, least)))
    room = 1024 * chip.shared_kib
    while (
        tile.stages > 1
        and shared_bytes(kernel, chip, tile, element_size, columns, score_bytes) > room
    ):
        tile = replace(tile, stages=tile.stages - 1)
    return tile


_tried: tuple[Kernel, Tile] | None = None


@contextmanager
def trying(kernel: Kernel, tile: Tile) -> Iterator[None]:
    """Inside it the kernel runs with this tile: how tuning compares them."""
    global _tried
    before, _tried = _tried, (kernel, tile)
    try:
        yield
    finally:
        _tried = before


def shared_bytes(
    kernel: Kernel, chip: Chip, tile: Tile, element_size: int, columns: int, score_bytes: int = 0
) -> int:
    """The shared memory that a tile may take, at most: rows it keeps (q; or k and v, or q and do);
    pairs of rows in flight; what it loads for each score; and tiles on their way between products,
    weights and for dk also ds."""
    row = columns * element_size
    kept, streamed = 2 * tile.block_m, 2 * tile.block_n
    if kernel == "bwd_dkdv":
        kept, streamed = streamed, kept
    elif kernel == "forward":
        kept = tile.block_m
    if chip.keeps_rows:
        kept = 0
    ahead = max(1, tile.stages - 1)
    in_flight = tile.stages if chip.warp_groups else ahead  # older chips read a tile to registers
    scores = tile.block_m * tile.block_n
    rows = tile.block_n if kernel == "bwd_dkdv" else tile.block_m
    between = scores * element_size * (2 if kernel == "bwd_dkdv" else 1)
    if chip.keeps_weights and 16 * tile.warps <= rows:
        between = 0
    return (kept + in_flight * streamed) * row + ahead * scores * score_bytes + between


_Rows = dict[str, tuple[tuple[int, int, int, int] | None, ...]]

# (queries, keys, warps, stages), for the widths 64, 128, 256 and 512.
# fmt: off
_HALVES: dict[Kernel, _Rows] = {
    "forward": {
        "sm80":  ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 1)),
        "sm86":  ((128, 128, 8, 3), (128, 64, 8, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
        "sm90":  ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (32, 32, 8, 1)),
        "sm100": ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2), (32, 32, 8, 1)),
        "gfx9":  ((128, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 16, 8, 1)),
    },
    "bwd_dkdv": {
        "sm80":  ((64, 128, 8, 3), (64, 64, 8, 2), (32, 64, 8, 2), (32, 16, 8, 1)),
        "sm86":  ((64, 128, 8, 3), (64, 64, 8, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
        "sm90":  ((64, 128, 8, 3), (64, 128, 8, 3), (32, 32, 8, 1), (32, 16, 8, 1)),
        "sm100": ((64, 128, 8, 3), (64, 128, 8, 3), (32, 64, 8, 2), (32, 16, 8, 1)),
        "gfx9":  ((64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
    "bwd_dq": {
        "sm80":  ((128, 64, 8, 3), (64, 64, 8, 2), (64, 64, 8, 1), (32, 16, 8, 1)),
        "sm86":  ((128, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 1), (32, 16, 8, 1)),
        "sm90":  ((128, 64, 8, 3), (128, 64, 8, 2), (32, 32, 4, 1), (32, 16, 8, 1)),
        "sm100": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 1), (32, 16, 8, 1)),
        "gfx9":  ((128, 64, 8, 2), (64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 8, 1)),
    },
    "bias_gradient": dict.fromkeys(
        CHIPS, ((64, 64, 4, 1), (64, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))
    ),
}

_FLOATS: dict[Kernel, _Rows] = {
    "forward": {
        "sm80":  ((128, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "sm86":  ((128, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "sm90":  ((128, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "sm100": ((128, 32, 8, 2), (64, 32, 8, 2), (16, 16, 4, 1), (16, 16, 4, 1)),
        "gfx9":  ((128, 32, 8, 2), (64, 32, 8, 2), (32, 16, 4, 2), (16, 16, 4, 1)),
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
}
# fmt: on
