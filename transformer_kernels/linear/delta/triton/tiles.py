"""Chunk and slice of the kernels of the gated delta rule, for each chip, precision and width.

No tile has been timed on a GPU.
"""

from __future__ import annotations

import torch

from ....backends.triton.config import Chip
from ...triton import tiles
from ...triton.tiles import WIDTHS, Precision, Tile

__all__ = ["WIDTHS", "Precision", "Tile", "precision", "solve_precision", "tile"]


def tile(chip: Chip, columns: int, precision: Precision) -> Tile:
    """Returns the tile of a call.

    Args:
        chip: GPU family.
        columns: elements per row, the larger of D and D_v; at most `WIDTHS[-1]`.
        precision: operands of products.
    """
    index = next(n for n, limit in enumerate(WIDTHS) if columns <= limit)
    return Tile(*_TILES[precision][index])


def precision(chip: Chip, dtype: torch.dtype, *, backward: bool = False) -> Precision:
    """Returns the operands of products for inputs of this dtype.

    bfloat16 calls have those of float16: the values V - (e K) S are small differences, and the
    triangular system passes their errors on. The gradient of log_decay takes more bits.
    """
    half = torch.float32 if dtype == torch.float32 else torch.float16
    return tiles.precision(chip, half, log_decay_needs_grad=backward)


def solve_precision(chip: Chip) -> Precision:
    """Returns the operands of the products of the triangular inverse: float32 for all inputs."""
    return tiles.precision(chip, torch.float32)


_TILES: dict[Precision, tuple[tuple[int, int, int, int], ...]] = {
    "tf32": ((64, 64, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    "bf16x3": ((32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    "bf16x6": ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    "ieee": ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
}
