"""Training-step benchmark: naive, torch's and fused attention in a reference model.

    python -m benchmarks.runner.training translator
    python -m benchmarks.runner.training generator --preset seed --contexts 512 1024 --tokens 2048

A step is forward, backward and optimizer; the implementations are interleaved. Memory is the peak
of a step beyond weights, gradients and optimizer state. A first loss that differs from the naive
one by more than a percent is an error. An implementation that runs out of memory is skipped and
reported. Rows are written to build/benchmarks/training.csv, or with --record to
benchmarks/results/<device>.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

import torch

from benchmarks.runner.record import RECORDED, ROOT
from transformer_kernels.bench import Budget, Interleaver, Provenance, clock_for, peak_extra_bytes
from transformer_kernels.nn import AttnImplementation
from transformer_kernels.training import PRESETS, Precision, TrainConfig, Trainer

IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
VARIANTS = {"eager": "naive", "fused": "fused", "sdpa": "torch"}
"""Names of the implementations in recorded rows."""
FILE = "training.csv"
LOSS_BAND = 0.01


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One measurement. The fields are the columns of training.csv, in order."""

    date: str
    commit: str
    device: str
    torch: str
    triton: str
    cuda: str
    threads: int
    model: str
    """kind and preset"""
    attention: str
    precision: Precision
    recompute: bool
    context: int
    batch: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    tokens_per_s: float
    """for a batch of held-out examples, because the token counts of padded batches vary"""
    peak_mib: float | None
    """peak of a step, beyond the memory in use between steps; None if it cannot be measured"""


def steps_of(
    config: TrainConfig, model: str, provenance: Provenance, budget: Budget,
    implementations: Sequence[AttnImplementation] = IMPLEMENTATIONS,
) -> tuple[list[StepRow], dict[str, str]]:  # fmt: skip
    """Measures training steps with each attention implementation.

    Returns:
        One row per implementation, and the reasons of those that run out of memory.

    Raises:
        AssertionError: the first losses differ by more than LOSS_BAND.
    """
    data = config.task.data()
    trainers: dict[AttnImplementation, Trainer] = {}
    peaks: dict[str, int | None] = {}
    losses: dict[AttnImplementation, float] = {}
    skipped: dict[str, str] = {}
    for path in implementations:
        try:
            trainer = Trainer(replace(config, attn_implementation=path), data)
            losses[path] = trainer.step().loss
            peaks[path] = peak_extra_bytes(lambda one=trainer: one.step, trainer.device)  # type: ignore[misc]
        except torch.cuda.OutOfMemoryError as error:
            skipped[path] = str(error).split("\n")[0]
            continue
        trainers[path] = trainer
    assert trainers, skipped
    first = next(iter(losses.values()))
    for path, loss in losses.items():
        assert abs(loss - first) <= LOSS_BAND * abs(first), f"{path}: loss {loss}, expected {first}"
    device = next(iter(trainers.values())).device
    timer = Interleaver(
        {path: lambda one=trainer: one.step for path, trainer in trainers.items()},  # type: ignore[misc]
        clock=clock_for(device),
    )
    timings = timer.run(budget)
    tokens = config.task.tokens(data.held_out(config.batch))
    rows = []
    for path in trainers:
        timing, peak = timings[path], peaks[path]
        rows.append(
            StepRow(
                **vars(provenance.on(device)), model=model, attention=VARIANTS[path],
                precision=config.precision, recompute=config.recompute,
                context=config.task.model.context, batch=config.batch,
                median_ms=timing.median_ms, p20_ms=timing.p20_ms, p80_ms=timing.p80_ms,
                tokens_per_s=tokens / timing.median_ms * 1e3,
                peak_mib=None if peak is None else peak / 2**20,
            )
        )  # fmt: skip
    return rows, skipped


def append(path: Path, rows: Sequence[StepRow]) -> None:
    """Appends rows to the CSV file, which is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(field.name for field in fields(StepRow))
        for row in rows:
            writer.writerow(
                f"{value:.4g}" if isinstance(value, float) else "" if value is None else value
                for value in vars(row).values()
            )


def table(rows: Sequence[StepRow]) -> list[str]:
    """Formats a Markdown table with one line per context and batch size."""
    lines = [
        "| context | batch | ms per step: naive, torch, fused | fused over naive, torch "
        "| peak MiB: naive, torch, fused |",
        "|---:|---:|---:|---:|---:|",
    ]
    for context, batch in sorted({(row.context, row.batch) for row in rows}):
        here = {row.attention: row for row in rows if (row.context, row.batch) == (context, batch)}
        three = [here.get(path) for path in ("naive", "torch", "fused")]
        times = ", ".join("-" if row is None else f"{row.median_ms:.0f}" for row in three)
        fused = here.get("fused")
        ratios = ", ".join(
            "-" if row is None or fused is None else f"{row.median_ms / fused.median_ms:.2f}x"
            for row in three[:2]
        )
        peaks = ", ".join(
            "-" if row is None or row.peak_mib is None else f"{row.peak_mib:.0f}" for row in three
        )
        lines.append(f"| {context} | {batch} | {times} | {ratios} | {peaks} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=[kind for kind in PRESETS if kind != "lookup"])
    parser.add_argument("--preset", help="default: the first preset of the kind")
    parser.add_argument("--contexts", type=int, nargs="+", help="default: that of the preset")
    parser.add_argument("--tokens", type=int, help="batch * context; default: the preset's batch")
    parser.add_argument(
        "--attention", choices=VARIANTS.values(), nargs="+", help="implementations; default: all"
    )
    parser.add_argument("--precision", choices=get_args(Precision), default="float32")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="time budget per context")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    named = PRESETS[args.kind]
    preset = args.preset or next(iter(named))
    provenance = Provenance.now()
    wanted = [
        one for one in IMPLEMENTATIONS if VARIANTS[one] in (args.attention or VARIANTS.values())
    ]
    rows: list[StepRow] = []
    given = named[preset]
    for context in args.contexts or [given.task.model.context]:
        model_config = replace(given.task.model, context=context)
        config = replace(
            given,
            task=replace(given.task, model=model_config),
            batch=given.batch if args.tokens is None else max(1, args.tokens // context),
            accumulate=1,
            precision=args.precision,
            recompute=args.recompute,
            device=args.device,
        )
        model = f"{args.kind} {preset}"
        new, skipped = steps_of(config, model, provenance, Budget(args.seconds), wanted)
        rows += new
        for path, reason in skipped.items():
            print(f"context {context}: {path} is skipped: {reason}")
        print(*table(new)[2:], sep="\n", flush=True)
    folder = RECORDED / rows[0].device if args.record else ROOT / "build" / "benchmarks"
    append(folder / FILE, rows)
    print("", *table(rows), "", f"rows: {folder / FILE}", sep="\n")


if __name__ == "__main__":
    main()
