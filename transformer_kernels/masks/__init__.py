"""Attention masks: `Mask` and its constraints, which define the visible (query, key) pairs."""

from transformer_kernels.masks.mask import Mask

__all__ = ["Mask"]
