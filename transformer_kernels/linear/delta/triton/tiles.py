"""Chunk and slice of the kernels of the gated delta rule, for each chip, precision and width.

No tile has been timed on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ....backends.triton.config import Chip
from ...triton import tiles
from ...triton.tiles import WIDTHS, Precision, Tile

__all__ = ["WIDTHS", "Precision", "Tile", "precision", "solve_precision", "tile"]


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
    found = Tile(*_TILES[precision][index])
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


_TILES: dict[Precision, tuple[tuple[int, int, int, int], ...]] = {
    "bf16x3": ((32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    "bf16x6": ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    "ieee": ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
}
