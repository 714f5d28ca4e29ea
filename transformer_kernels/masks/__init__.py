"""Attention masks: `Mask` and its constraints, which define the visible (query, key) pairs."""

from .mask import Mask

__all__ = ["Mask"]
