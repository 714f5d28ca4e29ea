"""The demo from beginning to end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from transformer_kernels import ops
from transformer_kernels.bench import Provenance, Row, memory_can_be_measured, write_rows
from transformer_kernels.bench.pictures import plot_by_length
from transformer_kernels.demo import speed
from transformer_kernels.demo.learning import Learned, train_side_by_side
from transformer_kernels.demo.pictures import plot_learning
from transformer_kernels.demo.settings import DemoSettings
from transformer_kernels.demo.tables import learning_table, speed_table
from transformer_kernels.info import info
from transformer_kernels.models import TextGenerator
from transformer_kernels.nn.options import AttentionPath
from transformer_kernels.training import CurveRow
from transformer_kernels.training.curves import rewrite_curve

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
    unavailable = ops.why_unavailable()
    if unavailable is not None:
        console.print(f"\nNo fused attention: {unavailable}", markup=False, soft_wrap=True)
    _show_speed(settings, out, console)
    _show_learning(settings, out, console, ("naive",) if unavailable else ("naive", "fused"))
    console.print("\nFiles:")
    for path in sorted(out.iterdir()):
        console.print(f"  {path}", markup=False, soft_wrap=True)


def _show_speed(settings: DemoSettings, out: Path, console: Console) -> None:
    console.rule("attention by itself")
    provenance = Provenance.now()
    rows: list[Row] = []
    left_out: list[str] = []
    pace = speed.Pace(settings.speed_seconds)
    with _progress(console) as progress:
        task = progress.add_task("measuring", total=sum(settings.lengths), now="")
        for case in speed.cases(settings):
            progress.update(task, now=f"length {case.N}")
            reason = speed.why_too_large(case) or pace.why_too_slow(case)
            if reason is None:
                with pace.timed(case):
                    rows.extend(speed.measure(case, settings, provenance))
            else:
                left_out.append(f"Left out: length {case.N}, {reason}.")
            progress.advance(task, case.N)
    for direction in speed.DIRECTIONS:
        console.print(speed_table(rows, direction))
    for line in left_out:
        console.print(line)
    console.print(
        "ms: median, the variants taking turns. gain: over naive bmm.\n"
        "MiB: the most held at once beyond q, k and v, output and gradients included.\n"
        "error: the largest against float64, relative to the largest value."
    )
    if not memory_can_be_measured():
        console.print("This system has no peak of memory that can be reset: no MiB.")
    write_rows(out / SPEED_ROWS, rows)
    plot_by_length(rows, out / SPEED_PICTURE)


def _show_learning(
    settings: DemoSettings, out: Path, console: Console, paths: tuple[AttentionPath, ...]
) -> None:
    config = settings.training
    data = config.task.data()
    console.rule(f"a small generator, context {config.task.model.context}, on {data.name}")
    with _progress(console) as progress:
        task = progress.add_task("training", total=config.steps, now="")

        def on_step(rows: Mapping[str, CurveRow]) -> None:
            losses = "  ".join(f"{path} {row.train_loss:.3f}" for path, row in rows.items())
            progress.update(task, advance=1, now=f"loss: {losses}")
            for path, row in rows.items():
                if row.score is not None:
                    console.print(
                        f"{path}: step {row.step:>5} after {row.seconds:.1f} s, "
                        f"{row.score:.4f} bits/byte on held-out text"
                    )

        learned = train_side_by_side(
            config, data, paths, seconds=settings.training_seconds, on_step=on_step
        )
    done = len(learned["naive"].result.rows)
    if done < config.steps:
        console.print(
            f"Stopped after {done} of {config.steps} steps, to end within minutes: other work, or "
            "few cores, slow this machine down."
        )
    title = f"{done} steps of {config.batch} x {config.task.model.context} bytes, the same seed"
    console.print(learning_table(learned, title))
    _compare(learned, console)
    for path, run in learned.items():
        rewrite_curve(out / f"curve-{path}.csv", run.result.rows)
    plot_learning(learned, out / LEARNING_PICTURE)
    _write_sample(settings, learned[paths[-1]], out, console)


def _compare(learned: Mapping[str, Learned], console: Console) -> None:
    if "fused" not in learned:
        return
    naive, fused = learned["naive"].result, learned["fused"].result
    apart = [abs(a - b) for a, b in zip(naive.losses, fused.losses, strict=True)]
    early = apart[: len(apart) // 10 + 1]
    console.print(
        f"Fused trains {naive.seconds / fused.seconds:.2f} times as fast. Training magnifies "
        f"rounding: the losses differ by at most {max(early):.0e} in the first tenth of the steps, "
        f"and by {max(apart):.0e} in all."
    )


def _write_sample(settings: DemoSettings, run: Learned, out: Path, console: Console) -> None:
    generator = torch.Generator().manual_seed(settings.training.seed)
    model = run.result.model
    assert isinstance(model, TextGenerator)
    written = model.generate(
        settings.prompt,
        settings.sample_bytes,
        temperature=settings.temperature,
        generator=generator,
    )
    text = (settings.prompt + written).decode(errors="replace")
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
