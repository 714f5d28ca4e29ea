"""Learning curves: one row a step, kept as CSV and drawn as a picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.optional_deps import require


class CurveRow(NamedTuple):
    """One training step. Losses are means, in nats."""

    step: int
    """Steps done, this one included"""
    tokens: int
    """What was read until now (`Task.unit`)"""
    seconds: float
    """Time spent in training steps until now; validation and checkpoints are not counted"""
    train_loss: float
    """On this step's batch"""
    val_loss: float | None
    """On held-out data; None where the step had no validation"""
    score: float | None
    """Likewise (`Task.score_name`)"""
    tokens_per_s: float
    """Of this step"""


def start_curve(path: Path) -> None:
    """A new CSV file, with its header alone; FileExistsError where there is one."""
    with path.open("x", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(CurveRow._fields)


def append_to_curve(path: Path, row: CurveRow) -> None:
    """Adds one row; on disk when it returns, so that a run that dies leaves its curve."""
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(_as_text(row))


def rewrite_curve(path: Path, rows: Iterable[CurveRow]) -> None:
    """The file anew, with these rows: those that a checkpoint vouches for."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(CurveRow._fields)
        writer.writerows(_as_text(row) for row in rows)


def read_curve(path: Path | str) -> list[CurveRow]:
    """The rows of a CSV file that a run wrote."""
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
    """(rows, 7) float64, NaN for None: exact, and small in a checkpoint."""
    values = [[math.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(values, dtype=torch.float64)


def rows_from_tensor(table: Tensor) -> list[CurveRow]:
    """The rows that `rows_to_tensor` was given."""
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
    """Draws runs by name into one picture: losses over steps and over seconds, and the score.

    Thin lines are training batches, dots held-out data. The file's ending chooses its format.
    ImportError where matplotlib is missing.
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
    figure.savefig(path, dpi=120)


def _as_text(row: CurveRow) -> list[str]:
    return ["" if value is None else repr(value) for value in row]


def _optional(text: str) -> float | None:
    return float(text) if text else None
