"""Progress bar of a training run, rendered by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..common.optional_deps import require
from .curves import CurveRow


@contextmanager
def progress_bar(
    steps: int, *, label: str = "training", unit: str = "tokens", score: str = "score"
) -> Iterator[Callable[[CurveRow], None]]:
    """Context that shows a progress bar on stderr and yields the `on_row` callback of a run.

    The bar shows the loss and speed of the last step. Every validation prints a line.

    Args:
        steps: total number of steps.
        label: name of the run.
        unit: unit of the speed, as `Task.unit`.
        score: name of the score, as `Task.score_name`.

    Raises:
        ImportError: rich is missing.
    """
    require("rich", extra="train")
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console) as progress:
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
