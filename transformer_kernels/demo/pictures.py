"""The picture of the second part: what was learned, how fast, in how much memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_kernels.bench.pictures import COLOURS, new_figure, save
from transformer_kernels.demo.learning import Learned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"naive": COLOURS["naive"], "fused": COLOURS["cpu"]}


def plot_learning(learned: Mapping[str, Learned], path: Path) -> None:
    """Loss by step, and averaged by time; time and memory of a step as bars."""
    figure, (by_step, by_time, milliseconds, memory) = new_figure(4)
    for index, (name, run) in enumerate(learned.items()):
        steps = [row.step for row in run.result.rows]
        seconds = [row.seconds for row in run.result.rows]
        bits = [row.train_loss / math.log(2) for row in run.result.rows]
        # The curves lie on each other: the first is drawn wide, and the next thin, above it.
        by_step.plot(
            steps,
            bits,
            color=_COLOURS[name],
            label=name,
            linewidth=1.0 if index else 4.0,
        )
        by_time.plot(
            _averages(seconds),
            _averages(bits),
            color=_COLOURS[name],
            label=name,
            marker="o",
            markersize=4,
        )
    by_step.set(title="the same losses", xlabel="step", ylabel="bits per byte")
    by_time.set(title="sooner", xlabel="seconds of training", ylabel="bits per byte, averages")
    by_step.legend()
    _bars(
        milliseconds,
        "milliseconds a training step",
        {name: 1e3 * run.result.seconds / len(run.result.rows) for name, run in learned.items()},
    )
    peaks = {name: run.peak_bytes for name, run in learned.items() if run.peak_bytes is not None}
    _bars(
        memory,
        "MiB at the peak of a training step",
        {name: peak / 2**20 for name, peak in peaks.items()},
    )
    save(figure, path)


def _averages(values: list[float]) -> list[float]:
    """Of 20 runs of consecutive values, or of fewer where there are few."""
    size = -(-len(values) // 20)
    return [
        sum(part) / len(part)
        for part in (values[start : start + size] for start in range(0, len(values), size))
    ]


def _bars(axes: Axes, title: str, values: Mapping[str, float]) -> None:
    bars = axes.bar(list(values), list(values.values()), color=[_COLOURS[name] for name in values])
    axes.bar_label(bars, fmt="%.0f")
    axes.grid(visible=False)
    axes.margins(y=0.15)
    axes.set(title=title)
