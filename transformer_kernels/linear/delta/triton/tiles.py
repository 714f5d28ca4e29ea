"""Chunk and slice of the kernels of the gated delta rule, for each chip, precision and width.

Each tile is the largest tried that spills few registers inside its loops, according to the compiler
(`python -m transformer_kernels tiles`). Exception: float32 of width 256 spills with every tile. A
slice has at least 32 columns: for narrow tiles see docs/triton.md, section 5. No tile has been
timed on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ....backends.triton.config import Chip
from ...triton import tiles
from ...triton.tiles import WIDTHS, Precision, Tile


def tile(chip: Chip, columns: int, precision: Precision, *, channels: bool) -> Tile:
    """Returns the tile of a call.

    Args:
        chip: GPU family.
        columns: elements per row, the larger of D and D_v; at most `WIDTHS[-1]`.
        precision: operands of products.
        channels: True if each channel has a gate. The decays of wide rows then take so many
            registers that a chunk has 16 tokens.
    """
    index = next(n for n, limit in enumerate(WIDTHS) if columns <= limit)
    found = Tile(*_TILES[chip.name][precision][index])
    return replace(found, chunk=16) if channels and index else found


def precision(chip: Chip, dtype: torch.dtype) -> Precision:
    """Returns the operands of products for inputs of this dtype.

    Half precision has two bfloat16 parts, 16 bits: V - (e K) S is a small difference, the
    triangular system passes its errors on, and the gradient of log_decay cancels.
    """
    half = dtype != torch.float32
    return tiles.precision(chip, dtype, log_decay_needs_grad=half)


def solve_precision(chip: Chip) -> Precision:
    """Returns the operands of the products of the triangular inverse: float32 for all inputs."""
    return tiles.precision(chip, torch.float32)


_Rows = tuple[tuple[int, int, int, int], ...]

# (chunk, slice, warps, stages) for the widths 64, 128 and 256. A chunk has 16 or 32 tokens.
# fmt: off
_FLOATS: _Rows = ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1))
_AMPERE: dict[Precision, _Rows] = {
    "bf16x3": ((32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    "bf16x6": _FLOATS,
}
_HOPPER: dict[Precision, _Rows] = {
    "bf16x3": ((32, 64, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    "bf16x6": _FLOATS,
}
_TILES: dict[str, dict[Precision, _Rows]] = {
    "sm80": _AMPERE,
    "sm86": _AMPERE,
    "sm90": _HOPPER,
    "sm100": _HOPPER,
    "gfx9": {"ieee": ((32, 32, 4, 1), (16, 32, 8, 1), (16, 32, 8, 1))},
}
# fmt: on
