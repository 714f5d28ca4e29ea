"""Masks: the keys that each query may attend to."""

from transformer_kernels.masks.mask import Mask

__all__ = ["Mask"]
