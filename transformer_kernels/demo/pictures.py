"""Picture of part two: losses over steps and over time, time and memory of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench.pictures import COLOURS, new_figure, save
from .learning import MeasuredRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"eager": COLOURS["naive"], "fused": COLOURS["cpu"]}


def plot_learning(runs: Mapping[str, MeasuredRun], bits_per_nat: float, path: Path) -> None:
    """Draws the runs into one picture.

    Args:
        runs: measured runs by name.
        bits_per_nat: factor from nats per token to bits per byte.
        path: output file.
    """
    figure, (by_step, by_time, milliseconds, memory) = new_figure(4)
    for index, (name, run) in enumerate(runs.items()):
        seconds = [row.seconds for row in run.result.rows]
        bits = [row.train_loss * bits_per_nat for row in run.result.rows]
        # The curves coincide: the first is drawn wide, the next thin and on top.
        width, colour = 1.0 if index else 4.0, _COLOURS[name]
        steps = [row.step for row in run.result.rows]
        by_step.plot(steps, bits, color=colour, label=name, linewidth=width)
        by_time.plot(
            _averages(seconds), _averages(bits), color=colour, label=name, marker="o", markersize=4
        )
    by_step.set(title="loss by step", xlabel="step", ylabel="bits per byte")
    by_time.set(
        title="loss by time", xlabel="seconds of training", ylabel="bits per byte, averaged"
    )
    by_step.legend()
    _bars(
        milliseconds,
        "milliseconds per training step",
        {name: 1e3 * run.result.seconds / len(run.result.rows) for name, run in runs.items()},
    )
    peaks = {name: run.peak_bytes for name, run in runs.items() if run.peak_bytes is not None}
    _bars(
        memory,
        "peak MiB of a training step",
        {name: peak / 2**20 for name, peak in peaks.items()},
    )
    save(figure, path)


def _averages(values: list[float], size: int = 5) -> list[float]:
    """Means of consecutive groups of `size` values."""
    parts = (values[start : start + size] for start in range(0, len(values), size))
    return [sum(part) / len(part) for part in parts]


def _bars(axes: Axes, title: str, values: Mapping[str, float]) -> None:
    bars = axes.bar(list(values), list(values.values()), color=[_COLOURS[name] for name in values])
    axes.bar_label(bars, fmt="%.0f")
    axes.grid(visible=False)
    axes.margins(y=0.15)
    axes.set(title=title)
