"""Padding masks: the mask of the keys that are tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ...masks.mask import Mask


def padding_mask(visible: Tensor, own: Tensor, M: int, *, keep_full: bool = False) -> Mask:
    """Returns a key range, and segments if the visible keys have gaps.

    Args:
        visible: bool (B, N), True = a token.
        own: the part of `visible` that belongs to the keys of this process; elsewhere all of it.
        M: number of queries.
        keep_full: returns a key range even if every key is visible.
    """
    B, N = visible.shape
    count = visible.sum(-1)
    if bool((count == N).all()) and not keep_full:
        return Mask()
    start = visible.byte().argmax(-1)
    last = N - visible.flip(-1).byte().argmax(-1)
    end = torch.where(count > 0, last, start)
    keys = Mask.key_range(start, end)
    if bool((end - start == count).all()):
        return keys
    return keys & Mask.segments(own.new_ones(B, M).byte(), own.byte())
