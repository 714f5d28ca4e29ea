"""The demo from beginning to end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from transformer_kernels.backends.native import extension
from transformer_kernels.bench import Provenance, Row, memory_can_be_measured, write_rows
from transformer_kernels.bench.pictures import plot_by_length
from transformer_kernels.demo import speed
from transformer_kernels.demo.learning import Learned, train_side_by_side
from transformer_kernels.demo.pictures import plot_learning
from transformer_kernels.demo.settings import DemoSettings
from transformer_kernels.demo.tables import learning_table, speed_table
from transformer_kernels.info import info
from transformer_kernels.models import GPT2
from transformer_kernels.models.generation import generate
from transformer_kernels.nn.options import AttnImplementation
from transformer_kernels.training import CurveRow, Tokens
from transformer_kernels.training.curves import rewrite_curve
from transformer_kernels.training.data import TokenWindows

SPEED_ROWS = "attention.csv"
SPEED_PICTURE = "attention.png"
LEARNING_PICTURE = "training.png"
SAMPLE = "sample.txt"


def run_demo(settings: DemoSettings, out: Path) -> None:
    """Prints tables, and writes rows, pictures, curves and a sample into the folder `out`.

    OSError where the folder is not there or cannot be written.
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
    console.rule("attention by itself")
    pace, provenance = speed.Pace(settings.speed_seconds), Provenance.now()
    by_length: list[Row] = []
    others: list[Row] = []
    plan = [(others, case) for case in speed.other_cases(settings)]
    plan += [(by_length, case) for case in speed.length_cases(settings)]
    plan.sort(key=lambda item: speed.pairs(item[1]))  # the slowest last; at one size, masks first
    left_out: list[str] = []
    with _progress(console) as progress:
        task = progress.add_task("measuring", total=len(plan), now="")
        for rows, case in plan:
            name = f"{case.name}, {case.dtype_name}, length {case.N}"
            progress.update(task, now=name)
            reason = speed.why_too_large(case) or pace.why_too_slow(case)
            if reason is None:
                with pace.timed(case):
                    rows.extend(speed.measure(case, settings, provenance))
            else:
                left_out.append(f"Left out: {name}, {reason}.")
            progress.advance(task)
    heads = f"{settings.heads} heads of {settings.width}"
    title = f"causal, float32, {heads}; both: forward + backward"
    console.print(speed_table(title, "length", by_length, lambda row: str(row.N)))
    title = f"length {settings.masked_length}, {heads}"
    console.print(speed_table(title, "mask, dtype", others, lambda row: f"{row.case}, {row.dtype}"))
    for line in left_out:
        console.print(line)
    console.print(
        "ms: medians, variants in turns. x naive, x SDPA: times as fast, forward + backward.\n"
        "MiB: peak memory beyond q, k and v, with the output and the gradients.\n"
        "error: the largest against float64, relative to the largest value.\n"
        "packed: eight documents in one row, causal. padded: four rows of half the length, filled "
        "to 4/4, 3/4, 2/4 and 1/4."
    )
    if not memory_can_be_measured():
        console.print("MiB is missing: this system has no peak of memory that can be reset.")
    write_rows(out / SPEED_ROWS, [*by_length, *others])
    plot_by_length(by_length, out / SPEED_PICTURE)


def _show_learning(
    settings: DemoSettings, out: Path, console: Console, paths: tuple[AttnImplementation, ...]
) -> None:
    config = settings.training
    context = config.task.model.context
    console.rule(f"a small GPT-2, context {context}, learns byte pairs")
    with console.status("reading the standard library, and merging its byte pairs"):
        data = config.task.data()
    assert isinstance(data, TokenWindows)
    with _progress(console) as progress:
        task = progress.add_task("training", total=config.steps, now="")

        def on_step(rows: Mapping[str, CurveRow]) -> None:
            losses = "  ".join(f"{path} {row.train_loss:.2f}" for path, row in rows.items())
            progress.update(task, advance=1, now=f"loss: {losses}")

        learned = train_side_by_side(config, data, paths, limits=settings.limits, on_step=on_step)
    last = learned[paths[-1]].result
    if not last.finished:
        console.print(
            f"Stopped after {len(last.rows)} of {config.steps} steps, to end within minutes: this "
            "machine is slow or busy."
        )
    title = f"{data.name}: steps of {config.batch} x {context} tokens, the same seed"
    console.print(learning_table(learned, title))
    _compare(learned, console)
    for path, run in learned.items():
        rewrite_curve(out / f"curve-{path}.csv", run.result.rows)
    bits_per_nat = 1.0 / (math.log(2) * data.bytes_per_token)
    plot_learning(learned, bits_per_nat, out / LEARNING_PICTURE)
    _write_sample(settings, last.model, data.tokens, out, console)


def _compare(learned: Mapping[str, Learned], console: Console) -> None:
    """Speed in the steps that both runs did, and how far their losses are apart."""
    if "fused" not in learned:
        return
    eager, fused = learned["eager"].result, learned["fused"].result
    steps = len(eager.rows)
    apart = max(abs(a - b) for a, b in zip(eager.losses, fused.losses, strict=False))
    console.print(
        f"In {steps} steps, taken in turns, fused attention trained "
        f"{eager.seconds / fused.rows[steps - 1].seconds:.2f} times as fast. The losses differ by "
        f"at most {apart:.0e}: training magnifies rounding."
    )


def _write_sample(
    settings: DemoSettings, model: nn.Module, tokens: Tokens, out: Path, console: Console
) -> None:
    assert isinstance(model, GPT2)
    generator = torch.Generator().manual_seed(settings.training.seed)
    written = generate(
        model,
        tokens.encode(settings.prompt).tolist(),
        settings.sample_tokens,
        temperature=settings.temperature,
        generator=generator,
    )
    text = (settings.prompt + tokens.decode(list(written))).decode(errors="replace")
    console.rule(f"what it writes, temperature {settings.temperature}")
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
