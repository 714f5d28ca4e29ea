"""Pictures of a mask, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = "·░▒▓█"
_LARGEST = 64


def as_text(shown: Tensor) -> str:
    """Rows of characters for a bool tensor (M, N): · hidden, █ visible, shades in between."""
    M, N = shown.shape
    if M == 0 or N == 0:
        return f"(no pairs: {M} queries, {N} keys)"
    share = torch.nn.functional.adaptive_avg_pool2d(
        shown.float()[None, None], (min(M, _LARGEST), min(N, _LARGEST))
    )[0, 0]
    # A cell is blank only when nothing in it is visible, and solid only when all of it is.
    levels = torch.where(share == 1, 4, torch.where(share == 0, 0, (share * 3).ceil().long()))
    return "\n".join("".join(_SHADES[level] for level in row) for row in levels.tolist())


def as_plot(shown: Tensor) -> Axes:
    """An image of a bool tensor (M, N) on new matplotlib axes."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "Mask.plot needs matplotlib: pip install transformer_kernels[train]"
        ) from error

    _, axes = plt.subplots()
    axes.imshow(shown.cpu().numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("key j")
    axes.set_ylabel("query i")
    return axes
