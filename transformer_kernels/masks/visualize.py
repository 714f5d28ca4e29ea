"""Renderings of a mask, as text and as a matplotlib image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = "·░▒▓█"
_LARGEST = 64


def as_text(visible: Tensor) -> str:
    """Renders a bool tensor (M, N): · is hidden, █ is visible, shades are partly visible."""
    M, N = visible.shape
    if M == 0 or N == 0:
        return f"(no pairs: {M} queries, {N} keys)"
    share = torch.nn.functional.adaptive_avg_pool2d(
        visible.float()[None, None], (min(M, _LARGEST), min(N, _LARGEST))
    )[0, 0]
    # A cell is · only if it is entirely hidden, and █ only if it is entirely visible.
    levels = torch.where(share == 1, 4, torch.where(share == 0, 0, (share * 3).ceil().long()))
    return "\n".join("".join(_SHADES[level] for level in row) for row in levels.tolist())


def as_plot(visible: Tensor) -> Axes:
    """Plots a bool tensor (M, N) on new matplotlib axes."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "Mask.plot needs matplotlib: pip install transformer_kernels[train]"
        ) from error

    _, axes = plt.subplots()
    axes.imshow(visible.cpu().numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("key j")
    axes.set_ylabel("query i")
    return axes
