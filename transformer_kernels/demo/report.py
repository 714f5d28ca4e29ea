"""Runs both parts of the demo and writes their output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from ..backends.native import extension
from ..bench import Provenance, Row, memory_can_be_measured, write_rows
from ..bench.memory import too_large_reason
from ..bench.pictures import plot_by_length
from ..info import info
from ..models import GPT2
from ..models.generation import generate
from ..nn.options import AttnImplementation
from ..training import CurveRow, Tokens
from ..training.curves import rewrite_curve
from ..training.data import TokenWindows
from . import speed
from .learning import MeasuredRun, train_interleaved
from .pictures import plot_learning
from .settings import DemoSettings
from .tables import learning_table, speed_table

SPEED_ROWS = "attention.csv"
SPEED_PICTURE = "attention.png"
LEARNING_PICTURE = "training.png"
SAMPLE = "sample.txt"


def run_demo(settings: DemoSettings, out: Path) -> None:
    """Runs the demo: prints tables; writes CSV files, pictures and a text sample.

    Args:
        settings: problem sizes; `FULL` or `QUICK`.
        out: existing output folder.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    console = Console(highlight=False)
    console.print(str(info()), markup=False, soft_wrap=True)
    unavailable = extension.unavailable_reason()
    if unavailable is not None:
        console.print(f"\nNo fused attention: {unavailable}", markup=False, soft_wrap=True)
    _show_speed(settings, out, console)
    _show_learning(settings, out, console, ("eager",) if unavailable else ("eager", "fused"))
    console.print("\nFiles:")
    for path in sorted(out.iterdir()):
        console.print(f"  {path}", markup=False, soft_wrap=True)


def _show_speed(settings: DemoSettings, out: Path, console: Console) -> None:
    console.rule("attention alone")
    estimator, provenance = speed.TimeEstimator(settings.speed_seconds), Provenance.now()
    by_length: list[Row] = []
    others: list[Row] = []
    plan = [(others, case) for case in speed.other_cases(settings)]
    plan += [(by_length, case) for case in speed.length_cases(settings)]
    # Slowest last; the sort is stable, so masked cases come first among equals.
    plan.sort(key=lambda item: speed.pairs(item[1]))
    skipped: list[str] = []
    with _progress(console) as progress:
        task = progress.add_task("measuring", total=len(plan), now="")
        for rows, case in plan:
            name = f"{case.name}, {case.dtype_name}, length {case.N}"
            progress.update(task, now=name)
            reason = too_large_reason(case) or estimator.too_slow_reason(case)
            if reason is None:
                with estimator.observe(case):
                    rows.extend(speed.measure(case, settings, provenance))
            else:
                skipped.append(f"Skipped {name}: {reason}.")
            progress.advance(task)
    heads = f"{settings.heads} heads of {settings.width}"
    title = f"causal, float32, {heads}; both: forward + backward"
    console.print(speed_table(title, "length", by_length, lambda row: str(row.N)))
    title = f"length {settings.masked_length}, {heads}"
    console.print(speed_table(title, "mask, dtype", others, lambda row: f"{row.case}, {row.dtype}"))
    for line in skipped:
        console.print(line)
    console.print(
        "ms: median times, variants interleaved. x naive, x SDPA: speed-up, forward + backward.\n"
        "MiB: peak memory beyond q, k and v, including the output and the gradients.\n"
        "error: largest difference from float64, relative to the largest value.\n"
        "packed: eight documents in one row, causal. padded: four rows of half the length, filled "
        "to 4/4, 3/4, 2/4 and 1/4."
    )
    if not memory_can_be_measured():
        console.print("MiB is not shown: this system has no resettable peak-memory counter.")
    write_rows(out / SPEED_ROWS, [*by_length, *others])
    plot_by_length(by_length, out / SPEED_PICTURE)


def _show_learning(
    settings: DemoSettings,
    out: Path,
    console: Console,
    implementations: tuple[AttnImplementation, ...],
) -> None:
    config = settings.training
    context = config.task.model.context
    console.rule(f"training a small GPT-2, context {context}, on byte-pair tokens")
    with console.status("training the tokenizer on the standard library"):
        data = config.task.data()
    assert isinstance(data, TokenWindows)
    with _progress(console) as progress:
        task = progress.add_task("training", total=config.steps, now="")

        def on_step(rows: Mapping[str, CurveRow]) -> None:
            losses = "  ".join(f"{name} {row.train_loss:.2f}" for name, row in rows.items())
            progress.update(task, advance=1, now=f"loss: {losses}")

        runs = train_interleaved(
            config, data, implementations, limits=settings.limits, on_step=on_step
        )
    last = runs[implementations[-1]].result
    if not last.finished:
        console.print(
            f"Stopped after {len(last.rows)} of {config.steps} steps, at the time limit: this "
            "machine is slow or busy."
        )
    title = f"{data.name}: {config.batch} x {context} tokens per step, same seed"
    console.print(learning_table(runs, title))
    _compare(runs, console)
    for name, run in runs.items():
        rewrite_curve(out / f"curve-{name}.csv", run.result.rows)
    bits_per_nat = 1.0 / (math.log(2) * data.bytes_per_token)
    plot_learning(runs, bits_per_nat, out / LEARNING_PICTURE)
    _write_sample(settings, last.model, data.tokens, out, console)


def _compare(runs: Mapping[str, MeasuredRun], console: Console) -> None:
    """Prints the speed-up over the interleaved steps, and the largest difference in loss."""
    if "fused" not in runs:
        return
    eager, fused = runs["eager"].result, runs["fused"].result
    steps = len(eager.rows)
    difference = max(abs(a - b) for a, b in zip(eager.losses, fused.losses, strict=False))
    console.print(
        f"Over {steps} interleaved steps, fused attention trained "
        f"{eager.seconds / fused.rows[steps - 1].seconds:.2f} times as fast. The losses differ by "
        f"at most {difference:.0e}: training amplifies rounding errors."
    )


def _write_sample(
    settings: DemoSettings, model: nn.Module, tokens: Tokens, out: Path, console: Console
) -> None:
    assert isinstance(model, GPT2)
    generator = torch.Generator().manual_seed(settings.training.seed)
    generated = generate(
        model,
        tokens.encode(settings.prompt).tolist(),
        settings.sample_tokens,
        temperature=settings.temperature,
        generator=generator,
    )
    text = (settings.prompt + tokens.decode(list(generated))).decode(errors="replace")
    console.rule(f"text sample, temperature {settings.temperature}")
    console.print(text, markup=False)
    (out / SAMPLE).write_text(text, encoding="utf-8")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
