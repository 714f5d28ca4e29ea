"""Figures of recorded rows, drawn with matplotlib (extra `train`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .cases import Direction
from .rows import Row
from .variants import VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "naive": "#c44e52",
    "sdpa": "#8c8c8c",
    "sdpa_flash": "#dd8452",
    "sdpa_cudnn": "#55a868",
    "sdpa_efficient": "#937860",
    "flex": "#8172b3",
    "flash_attn": "#e6a0a3",
    "xformers": "#b5c689",
    "fla": "#c9b3d5",
    "cpu": "#4c72b0",
    "triton": "#64b5cd",
    "cuda_sm80": "#ccb974",
    "cuda_sm90": "#da8bc3",
}
"""Colour of each variant, the same in every figure."""

TITLES: dict[Direction, str] = {
    "fwd": "forward",
    "bwd": "backward",
    "fwd+bwd": "forward + backward",
}

LABELS = {variant.name: variant.label for variant in VARIANTS.values()}
"""Names of the variants in the pictures, in their order."""


def plot_by_length(rows: Sequence[Row], path: Path, labels: Mapping[str, str] = LABELS) -> None:
    """Plots time and peak memory over the sequence length.

    Args:
        rows: rows that differ only in length, direction and variant.
        path: output file; its suffix selects the format.
        labels: names of the variants to draw, in their order. One without a colour in COLOURS
            takes the colour of a variant that is not drawn.
    """
    directions = [one for one in TITLES if any(row.direction == one for row in rows)]
    figure, panels = new_figure(len(directions) + 1)
    for axes, direction in zip(panels, directions, strict=False):
        _draw(axes, _only(rows, direction), lambda row: row.N, lambda row: row.median_ms, labels)
        axes.set(title=TITLES[direction], ylabel="milliseconds")
    with_memory = [row for row in _only(rows, directions[-1]) if row.peak_mib is not None]
    _draw(panels[-1], with_memory, lambda row: row.N, lambda row: row.peak_mib or 0.0, labels)
    panels[-1].set(title=f"memory, {TITLES[directions[-1]]}", ylabel="MiB at the peak")
    lengths = sorted({row.N for row in rows})
    for axes in panels:
        axes.set(xlabel="sequence length", xscale="log", yscale="log")
        axes.minorticks_off()
        axes.set_xticks(lengths, [str(length) for length in lengths])
    panels[0].legend()
    save(figure, path)


def plot_by_visible(rows: Sequence[Row], path: Path) -> None:
    """Plots time over the visible fraction.

    Args:
        rows: rows that differ only in mask, direction and variant.
        path: output file; its suffix selects the format.
    """
    directions = [one for one in TITLES if any(row.direction == one for row in rows)]
    figure, panels = new_figure(len(directions))
    for axes, direction in zip(panels, directions, strict=True):
        chosen = _only(rows, direction)
        _draw(axes, chosen, lambda row: row.visible, lambda row: row.median_ms, line="none")
        axes.set(
            title=TITLES[direction],
            xlabel="visible fraction of the query-key pairs",
            ylabel="milliseconds",
        )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    panels[0].legend()
    save(figure, path)


def new_figure(panels: int) -> tuple[Figure, list[Axes]]:
    """Creates a figure with a row of empty panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * panels, 3.6), layout="constrained", dpi=120)
    grid = figure.subplots(1, panels, squeeze=False)
    for axes in grid[0]:
        axes.grid(alpha=0.3)
    return figure, list(grid[0])


def save(figure: Figure, path: Path) -> None:
    """Saves the figure. SVG files of equal figures are identical byte for byte."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "transformer_kernels", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _only(rows: Sequence[Row], direction: Direction) -> list[Row]:
    return [row for row in rows if row.direction == direction]


def _draw(
    axes: Axes,
    rows: Sequence[Row],
    x: Callable[[Row], float],
    y: Callable[[Row], float],
    labels: Mapping[str, str] = LABELS,
    *,
    line: str = "-",
) -> None:
    spare = (colour for name, colour in COLOURS.items() if name not in labels)
    for name, label in labels.items():
        colour = COLOURS[name] if name in COLOURS else next(spare)
        mine = sorted((row for row in rows if row.variant == name), key=x)
        if mine:
            axes.plot(
                [x(row) for row in mine],
                [y(row) for row in mine],
                color=colour,
                label=label,
                linestyle=line,
                marker="o",
                markersize=4,
            )
