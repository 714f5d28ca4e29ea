"""The kernel "linear-layers": the gated delta rule and its convolution, as layers."""

from __future__ import annotations

from . import layers

__all__ = ["layers"]
