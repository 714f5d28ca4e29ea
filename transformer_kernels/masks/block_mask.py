"""The tiles of a `BlockMask` of torch's FlexAttention, and the pairs that it makes visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..common.argument_checks import shown

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_PAIRS_AT_ONCE = 1 << 22
"""mask_mod is evaluated for so many pairs at a time, with a few int64 values for each."""


def check_block_mask(block_mask: BlockMask) -> None:
    """Raises TypeError if block_mask is not a BlockMask."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {shown(block_mask)}")


def partial_tiles(block_mask: BlockMask) -> Tensor:
    """Returns the tiles that mask_mod decides: bool (B, H, rows of tiles, columns of tiles)."""
    return _blocks(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)


def full_tiles(block_mask: BlockMask) -> Tensor:
    """Returns the tiles that are wholly visible, in the shape of `partial_tiles`."""
    count, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if count is None or indices is None:
        return torch.zeros_like(partial_tiles(block_mask))
    return _blocks(block_mask, count, indices)


def visible_pairs(block_mask: BlockMask, partial: Tensor, full: Tensor) -> Tensor:
    """Returns the visible pairs, bool (B, H, M, N)."""
    (M, N), (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    tiles = full[..., None, None].repeat(1, 1, 1, 1, rows, columns)
    places, at_once = partial.nonzero(), max(1, _PAIRS_AT_ONCE // (rows * columns))
    for first in range(0, len(places), at_once):
        some = places[first : first + at_once]
        tiles[some.unbind(1)] = _evaluated(block_mask, some)
    return tiles.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :M, :N]


def _blocks(block_mask: BlockMask, count: Tensor, indices: Tensor) -> Tensor:
    """Returns bool (B, H, rows, columns) of tiles: the first `count` indices of each row.

    Further indices have no meaning.
    """
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    listed = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
    blocks = indices.new_zeros(*count.shape, columns + 1, dtype=torch.bool)
    blocks.scatter_(-1, torch.where(listed, indices, columns).long(), True)
    return blocks[..., :columns]


def _evaluated(block_mask: BlockMask, places: Tensor) -> Tensor:
    """Evaluates mask_mod in the tiles at places (tiles, 4): bool (tiles, rows, columns)."""
    (M, N), (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    b, h, row, column = places.unbind(1)
    index = torch.arange(max(rows, columns), device=places.device)
    # Pairs beyond M and N are cut off afterwards.
    i = (row[:, None] * rows + index[:rows]).clamp(max=M - 1)
    j = (column[:, None] * columns + index[:columns]).clamp(max=N - 1)
    by_key = torch.vmap(block_mask.mask_mod, (None, None, None, 0))
    by_query = torch.vmap(by_key, (None, None, 0, None))
    visible: Tensor = torch.vmap(by_query)(b, h, i, j)
    return visible
