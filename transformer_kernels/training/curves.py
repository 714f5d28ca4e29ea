"""Learning curves: one row per step, stored as CSV and drawn as a picture."""

from __future__ import annotations

import csv
import errno
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.optional_deps import require
from .output_files import naming, replacing


class CurveRow(NamedTuple):
    """One training step. Losses are means, in nats."""

    step: int
    """Steps done, including this one"""
    tokens: int
    """Tokens read so far, in `Task.unit`"""
    seconds: float
    """Time of all training steps so far, without validation and checkpoints"""
    train_loss: float
    """Loss of this step's batch"""
    val_loss: float | None
    """Loss on held-out data; None if the step had no validation"""
    score: float | None
    """Score on held-out data (`Task.score_name`); None if the step had no validation"""
    tokens_per_s: float
    """Speed of this step"""


def start_curve(path: Path) -> None:
    """Creates a CSV file with only the header; FileExistsError if it exists."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    rewrite_curve(path, ())


def append_to_curve(path: Path, row: CurveRow) -> None:
    """Appends one row and closes the file, so that an aborted run keeps its curve."""
    with naming(path), path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(_as_text(row))


def rewrite_curve(path: Path, rows: Iterable[CurveRow]) -> None:
    """Replaces the file's content with these rows, for example those of a checkpoint."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(CurveRow._fields)
    writer.writerows(_as_text(row) for row in rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def read_curve(path: Path | str) -> list[CurveRow]:
    """Reads the CSV file of a run."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return [
            CurveRow(
                step=int(row["step"]),
                tokens=int(row["tokens"]),
                seconds=float(row["seconds"]),
                train_loss=float(row["train_loss"]),
                val_loss=_optional(row["val_loss"]),
                score=_optional(row["score"]),
                tokens_per_s=float(row["tokens_per_s"]),
            )
            for row in csv.DictReader(file)
        ]


def rows_to_tensor(rows: Sequence[CurveRow]) -> Tensor:
    """Returns (rows, 7) float64, NaN for None: exact, and compact in a checkpoint."""
    values = [[math.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(values, dtype=torch.float64)


def rows_from_tensor(table: Tensor) -> list[CurveRow]:
    """Inverse of `rows_to_tensor`."""
    rows: list[CurveRow] = []
    for step, tokens, seconds, train_loss, val_loss, score, speed in table.tolist():
        validated = not math.isnan(val_loss)
        rows.append(
            CurveRow(
                step=int(step),
                tokens=int(tokens),
                seconds=seconds,
                train_loss=train_loss,
                val_loss=val_loss if validated else None,
                score=score if validated else None,
                tokens_per_s=speed,
            )
        )
    return rows


def plot_curves(
    curves: Mapping[str, Sequence[CurveRow]], path: Path | str, *, score: str = "score"
) -> None:
    """Draws runs into one picture: loss over steps, loss over seconds, score over steps.

    Thin lines are training batches, dots are held-out data.

    Args:
        curves: rows of each run, by name.
        path: output file; its suffix selects the format.
        score: axis label of the score.

    Raises:
        ImportError: matplotlib is missing.
    """
    require("matplotlib", extra="train")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    by_step, by_time, scores = figure.subplots(1, 3)
    for index, (name, rows) in enumerate(curves.items()):
        validated = [row for row in rows if row.val_loss is not None]
        dots: dict[str, Any] = {"color": f"C{index}", "marker": "o", "markersize": 4, "label": name}
        for axes, field in ((by_step, "step"), (by_time, "seconds")):
            axes.plot(
                [getattr(row, field) for row in rows],
                [row.train_loss for row in rows],
                color=f"C{index}",
                linewidth=0.6,
                alpha=0.5,
            )
            axes.plot(
                [getattr(row, field) for row in validated],
                [row.val_loss for row in validated],
                **dots,
            )
        scores.plot([row.step for row in validated], [row.score for row in validated], **dots)
    by_step.set(xlabel="step", ylabel="loss (nats)")
    by_time.set(xlabel="seconds of training", ylabel="loss (nats)")
    scores.set(xlabel="step", ylabel=score)
    for axes in (by_step, by_time, scores):
        axes.grid(alpha=0.3)
    by_step.legend(title="held-out data; thin: batches")
    path = Path(path)
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format=path.suffix[1:] or None)


def _as_text(row: CurveRow) -> list[str]:
    return ["" if value is None else repr(value) for value in row]


def _optional(text: str) -> float | None:
    return float(text) if text else None
