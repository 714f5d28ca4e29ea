"""Learning curves: one row per step, stored as CSV, drawn as a picture, shown while training."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..common.argument_checks import shown
from ..common.optional_deps import require


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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError: those of `write` have none, for example if the disk is full."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def append_to_curve(path: Path, row: CurveRow) -> None:
    """Appends one row and closes the file, so that an aborted run keeps its curve."""
    with naming(path), path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(row)


def rewrite_curve(path: Path, rows: Iterable[CurveRow]) -> None:
    """Replaces the file's content with these rows, for example those of a checkpoint."""
    with naming(path), path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([CurveRow._fields, *rows])


def read_curve(path: Path | str) -> list[CurveRow]:
    """Reads the CSV file of a run; the inverse of `rewrite_curve`, to the last bit.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a curve.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        if tuple(header) != CurveRow._fields:
            raise ValueError(f"its columns are {shown(header)}")
        numbers: list[list[Any]] = [[float(x) if x else None for x in row] for row in rows]
        return [CurveRow(int(step), int(tokens), *rest) for step, tokens, *rest in numbers]
    except (ValueError, TypeError, OverflowError, csv.Error) as error:
        raise ValueError(f"{path} is not a curve: {shown(str(error))}") from None


def plot_curves(
    curves: Mapping[str, Sequence[CurveRow]], path: Path | str, *, score: str = "score"
) -> None:
    """Draws runs, by name, into one picture: loss over steps and seconds, score over steps.

    Thin lines are training batches, dots are held-out data. The suffix of `path` selects the
    format; `score` is the label of an axis. Raises ImportError if matplotlib is missing.
    """
    require("matplotlib", extra="train")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    by_step, by_time, scores = figure.subplots(1, 3)
    for index, (name, rows) in enumerate(curves.items()):
        thin: dict[str, Any] = {"color": f"C{index}", "linewidth": 0.6, "alpha": 0.5}
        dots: dict[str, Any] = {"color": f"C{index}", "marker": "o", "markersize": 4, "label": name}
        validated = [row for row in rows if row.val_loss is not None]
        steps, seconds = [row.step for row in validated], [row.seconds for row in validated]
        losses = [row.train_loss for row in rows]
        by_step.plot([row.step for row in rows], losses, **thin)
        by_time.plot([row.seconds for row in rows], losses, **thin)
        by_step.plot(steps, [row.val_loss for row in validated], **dots)
        by_time.plot(seconds, [row.val_loss for row in validated], **dots)
        scores.plot(steps, [row.score for row in validated], **dots)
    by_step.set(xlabel="step", ylabel="loss (nats)")
    by_time.set(xlabel="seconds of training", ylabel="loss (nats)")
    scores.set(xlabel="step", ylabel=score)
    for axes in (by_step, by_time, scores):
        axes.grid(alpha=0.3)
    by_step.legend(title="held-out data; thin: batches")
    with naming(Path(path)):
        figure.savefig(path, dpi=120)


@contextmanager
def progress_bar(
    steps: int, *, label: str = "training", unit: str = "tokens", score: str = "score"
) -> Iterator[Callable[[CurveRow], None]]:
    """Context that shows a progress bar on stderr and yields the `on_row` callback of a run.

    The bar shows the loss and speed of the last step. Every validation prints a line. `unit` and
    `score` are as `Task.unit` and `Task.score_name`. Raises ImportError if rich is missing.
    """
    require("rich", extra="train")
    from rich import progress as rich
    from rich.console import Console

    with rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[now]}"),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
    ) as progress:
        task = progress.add_task(label, total=steps, now="")

        def on_row(row: CurveRow) -> None:
            now = f"loss {row.train_loss:.3f}  {row.tokens_per_s:,.0f} {unit}/s"
            progress.update(task, completed=row.step, now=now)
            if row.val_loss is not None:
                progress.console.print(
                    f"{label}: step {row.step:>6}  held-out loss {row.val_loss:.3f}  "
                    f"{row.score:.3f} {score}  {row.seconds:.0f} s"
                )

        yield on_row
