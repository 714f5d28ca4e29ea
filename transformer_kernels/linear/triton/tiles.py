"""Chunk and slice of the kernels of linear attention, for each chip, precision and width.

Each tile is the largest tried that spills few registers inside its loops, according to the compiler
(`python -m transformer_kernels tiles`). Exception: float32 of width 256 spills with every tile.
No tile has been timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...backends.triton.config import Chip

Precision = Literal["bf16", "tf32", "bf16x3", "bf16x6", "ieee"]
"""Operands of matrix products.

"bf16" and "tf32" round them to 8 and to 11 bits; "bf16x3" and "bf16x6" multiply two and three
bfloat16 parts, 16 and 24 bits; "ieee" multiplies float32. float16 takes "tf32", which has as many
bits and the exponents of float32: a state overflows float16 after few tokens.
"""
WIDTHS = (64, 128, 256)
"""Widths of the table's columns. A row uses the first that is large enough."""


@dataclass(frozen=True)
class Tile:
    """Sizes of one program, with its launch parameters."""

    chunk: int
    """tokens of a result that one program computes"""
    slice: int
    """columns of the result"""
    warps: int
    stages: int
    """software pipeline stages"""


def tile(chip: Chip, columns: int, precision: Precision) -> Tile:
    """Returns the tile of a call.

    Args:
        chip: GPU family.
        columns: elements per row, the larger of D and D_v; at most `WIDTHS[-1]`.
        precision: operands of products.
    """
    index = next(n for n, limit in enumerate(WIDTHS) if columns <= limit)
    return Tile(*_TILES[chip.name][precision][index])


def segment(columns: int) -> int:
    """Returns the tokens between two states in memory, a multiple of every chunk.

    Longer segments have fewer states to write and read, and more pairs of tokens to multiply:
    docs/linear.md, section 6.
    """
    return 2 * next(limit for limit in WIDTHS if columns <= limit)


def precision(chip: Chip, dtype: torch.dtype, *, log_decay_needs_grad: bool = False) -> Precision:
    """Returns the operands of products for inputs of this dtype.

    The gradient of log_decay is a difference of large sums: it takes more bits.
    """
    if dtype == torch.bfloat16 and not log_decay_needs_grad:
        return "bf16"
    if chip.multiplies_float32:
        return "ieee"
    if dtype == torch.float32:
        return "bf16x6"
    return "bf16x3" if log_decay_needs_grad else "tf32"


_Rows = tuple[tuple[int, int, int, int], ...]

# (chunk, slice, warps, stages) for the widths 64, 128 and 256.
# fmt: off
_AMPERE: dict[Precision, _Rows] = {
    "bf16":   ((64, 64, 4, 1), (64, 128, 8, 2), (32, 64, 8, 1)),
    "tf32":   ((64, 64, 4, 1), (32, 64, 4, 1), (16, 64, 8, 1)),
    "bf16x3": ((64, 64, 8, 1), (32, 64, 8, 1), (16, 64, 8, 1)),
    "bf16x6": ((32, 64, 4, 1), (16, 64, 8, 1), (16, 64, 8, 1)),
}
_HOPPER = _AMPERE | {"bf16": ((64, 64, 4, 1), (64, 128, 4, 2), (64, 128, 8, 1))}
_TILES: dict[str, dict[Precision, _Rows]] = {
    "sm80": _AMPERE,
    "sm86": _AMPERE,
    "sm90": _HOPPER,
    "sm100": _AMPERE | {
        "bf16": ((64, 64, 4, 1), (64, 128, 8, 2), (64, 128, 8, 1)),
        "tf32": ((64, 64, 4, 1), (64, 64, 8, 1), (16, 64, 8, 1)),
    },
    "gfx9": {
        "bf16": ((64, 64, 4, 1), (64, 128, 8, 1), (32, 32, 8, 1)),
        "ieee": ((32, 64, 4, 1), (32, 64, 4, 1), (16, 32, 8, 1)),
    },
}
# fmt: on
