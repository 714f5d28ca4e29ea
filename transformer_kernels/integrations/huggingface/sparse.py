"""Sparse attention: masks of the keys, or blocks of keys, that a model's indexer chose."""

from __future__ import annotations

import torch
from torch import Tensor

from ...masks.mask import Mask


def mask_of_keys(indices: Tensor, N: int) -> Mask:
    """Returns the mask of chosen keys.

    Args:
        indices: integers (B, M, count) from 0 to N - 1: the keys that each query sees.
        N: number of keys.

    Source: `transformers.models.deepseek_v32`.
    """
    visible = indices.new_zeros(*indices.shape[:-1], N, dtype=torch.bool)
    return Mask.dense(visible.scatter(-1, indices.long(), True)[:, None])


def mask_of_blocks(block_indices: Tensor, block_size: int, H: int, N: int) -> Mask:
    """Returns the mask of chosen blocks of keys.

    Args:
        block_indices: integers (B, groups, M, count): the blocks that each query sees in the heads
            of a group; -1 = none.
        block_size: keys of a block.
        H: query heads, a multiple of the groups.
        N: number of keys.

    Source: `transformers.models.minimax_m3_vl`.
    """
    blocks = -(-N // block_size)
    visible = block_indices.new_zeros(*block_indices.shape[:-1], blocks + 1, dtype=torch.bool)
    chosen = block_indices.long().masked_fill(block_indices < 0, blocks)
    visible = visible.scatter(-1, chosen, True)[..., :blocks]
    visible = visible.repeat_interleave(block_size, dim=-1)[..., :N]
    return Mask.dense(visible.repeat_interleave(H // visible.shape[1], dim=1))
