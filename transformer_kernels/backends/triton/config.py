"""Every tile, for each chip, kernel, size of an element and width, with its reason.

Widths are those of rows in the tile, powers of 2 from 16; a row of a table serves the widths up to
it. A tile must fit the shared memory of its chip (`shared_memory`), and should not spill registers:
tests compile all of them for all chips and read both from what the compiler made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["forward", "key_gradients", "query_gradients", "bias_gradient"]


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
    precision: str = "tf32x3"
    """of float32 products: three of tensor-float-32 parts, which err like one of float32; or the
    chip's own, where its matrix units take float32"""


CHIPS = {
    "sm80": Chip("sm80", 163),
    "sm86": Chip("sm86", 99),  # also 8.9 and 12.0: consumer chips with less shared memory
    "sm90": Chip("sm90", 227),
    "sm100": Chip("sm100", 227),
    "gfx9": Chip("gfx9", 64, precision="ieee"),
}


def width(columns: int) -> int:
    """The tile's columns for rows of this many: a power of 2, 16 at least for tensor cores."""
    return max(16, 1 << (columns - 1).bit_length())


def chip_of(capability: tuple[int, int]) -> Chip:
    """An NVIDIA GPU's family, by its compute capability."""
    major, minor = capability
    if major >= 12 or (major == 8 and minor > 0):
        return CHIPS["sm86"]
    return CHIPS["sm80" if major == 8 else "sm90" if major == 9 else "sm100"]


def tile(kernel: Kernel, chip: Chip, element_size: int, columns: int) -> Tile:
    """The tile that runs, for rows of `columns` elements of `element_size` bytes."""
    table = (_HALVES if element_size == 2 else _FLOATS)[kernel]
    rows = table.get(chip.name, table["sm80"])
    return next(rows[limit] for limit in sorted(rows) if columns <= limit)


def shared_memory(kernel: Kernel, tile: Tile, element_size: int, columns: int) -> int:
    """Bytes that a tile needs: what it keeps, what is in flight, and one tile of weights."""
    pair = 2 * columns * element_size
    kept, streamed = tile.block_m, tile.block_n
    if kernel == "key_gradients":
        kept, streamed = streamed, kept
    if kernel == "forward":
        kept //= 2  # q alone; the others keep two operands
    return kept * pair + tile.stages * streamed * pair + kept * streamed * element_size


_HALVES: dict[Kernel, dict[str, dict[int, Tile]]] = {
    "forward": {
        # Two warpgroups at width 128; at 64 one holds 128 rows, and the scores stay in registers.
        "sm90": {
            64: Tile(128, 128, 4, 3),
            128: Tile(128, 64, 8, 3),
            256: Tile(64, 64, 4, 2),
            512: Tile(64, 32, 8, 1),
        },
        "sm100": {
            64: Tile(128, 128, 4, 3),
            128: Tile(128, 64, 8, 3),
            256: Tile(64, 64, 4, 2),
            512: Tile(64, 32, 8, 1),
        },
        "sm80": {
            64: Tile(128, 64, 4, 3),
            128: Tile(128, 64, 8, 3),
            256: Tile(64, 32, 4, 2),
            512: Tile(32, 32, 8, 1),
        },
        "sm86": {
            64: Tile(128, 64, 4, 2),
            128: Tile(64, 64, 4, 2),
            256: Tile(32, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
        # Shared memory holds K and V alone; q stays in registers.
        "gfx9": {
            64: Tile(128, 64, 4, 1),
            128: Tile(128, 32, 4, 1),
            256: Tile(64, 32, 4, 1),
            512: Tile(32, 16, 4, 1),
        },
    },
    "key_gradients": {
        "sm90": {
            64: Tile(64, 128, 8, 3),
            128: Tile(64, 128, 8, 2),
            256: Tile(32, 64, 8, 1),
            512: Tile(16, 32, 8, 1),
        },
        "sm80": {
            64: Tile(64, 128, 8, 2),
            128: Tile(32, 128, 8, 2),
            256: Tile(32, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
        "sm86": {
            64: Tile(64, 64, 4, 2),
            128: Tile(32, 64, 4, 1),
            256: Tile(16, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
        "gfx9": {
            64: Tile(32, 64, 4, 1),
            128: Tile(32, 64, 4, 1),
            256: Tile(16, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
    },
    "query_gradients": {
        "sm90": {
            64: Tile(128, 64, 8, 3),
            128: Tile(128, 64, 8, 2),
            256: Tile(64, 32, 8, 1),
            512: Tile(32, 16, 8, 1),
        },
        "sm80": {
            64: Tile(128, 64, 8, 2),
            128: Tile(128, 32, 8, 2),
            256: Tile(32, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
        "sm86": {
            64: Tile(64, 64, 4, 2),
            128: Tile(64, 32, 4, 1),
            256: Tile(32, 16, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
        "gfx9": {
            64: Tile(64, 32, 4, 1),
            128: Tile(64, 32, 4, 1),
            256: Tile(32, 16, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
    },
    "bias_gradient": {
        "sm80": {
            64: Tile(64, 64, 4, 1),
            128: Tile(64, 64, 4, 1),
            256: Tile(32, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
        "sm86": {
            128: Tile(32, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
        "gfx9": {
            128: Tile(32, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
    },
}

_FLOATS: dict[Kernel, dict[str, dict[int, Tile]]] = {
    "forward": {
        "sm80": {
            64: Tile(64, 32, 4, 2),
            128: Tile(32, 32, 4, 2),
            256: Tile(32, 16, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
        "gfx9": {
            64: Tile(64, 32, 4, 1),
            128: Tile(32, 16, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
    },
    "key_gradients": {
        "sm80": {
            64: Tile(32, 32, 4, 1),
            128: Tile(16, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
    },
    "query_gradients": {
        "sm80": {
            64: Tile(32, 32, 4, 1),
            128: Tile(32, 16, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
    },
    "bias_gradient": {
        "sm80": {
            128: Tile(32, 32, 4, 1),
            512: Tile(16, 16, 4, 1),
        },
    },
}
