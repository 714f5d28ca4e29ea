"""Training steps of a reference model by naive, torch's and fused attention, over the context.

    python -m benchmarks.runner.training translator
    python -m benchmarks.runner.training generator --preset seed --contexts 512 1024 --tokens 2048

Each step is a whole one: forward, backward, optimizer; the paths take turns. Memory is what a step
holds at its peak beyond weights, gradients and optimizer. A path whose first step differs in its
loss from the naive one's by more than a percent is an error; one that runs out of memory is left
out, and that is said. Rows go to build/benchmarks/training.csv, or with --record to
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

PATHS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
VARIANTS = {"eager": "naive", "fused": "fused", "sdpa": "torch"}
"""Names of the variants in recorded rows"""
FILE = "training.csv"
LOSS_BAND = 0.01


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Its fields are the columns of training.csv."""

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
    """Of a batch of held-out examples; those of padded ones differ from batch to batch"""
    peak_mib: float | None
    """Of a step, beyond what is there between steps; None where the system cannot tell"""


def steps_of(
    config: TrainConfig, model: str, provenance: Provenance, budget: Budget,
    paths: Sequence[AttnImplementation] = PATHS,
) -> tuple[list[StepRow], dict[str, str]]:  # fmt: skip
    """A row for each path that can, and why others cannot. AssertionError where losses differ."""
    data = config.task.data()
    trainers: dict[AttnImplementation, Trainer] = {}
    peaks: dict[str, int | None] = {}
    losses: dict[AttnImplementation, float] = {}
    left_out: dict[str, str] = {}
    for path in paths:
        try:
            trainer = Trainer(replace(config, attn_implementation=path), data)
            losses[path] = trainer.step().loss
            peaks[path] = peak_extra_bytes(lambda one=trainer: one.step, trainer.device)  # type: ignore[misc]
        except torch.cuda.OutOfMemoryError as error:
            left_out[path] = str(error).split("\n")[0]
            continue
        trainers[path] = trainer
    assert trainers, left_out
    first = next(iter(losses.values()))
    for path, loss in losses.items():
        assert abs(loss - first) <= LOSS_BAND * abs(first), f"{path}: a loss of {loss}, not {first}"
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
    return rows, left_out


def append(path: Path, rows: Sequence[StepRow]) -> None:
    """To the file, which is made where it is missing."""
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
    """Markdown: a line a context, the paths side by side."""
    lines = [
        "| context | batch | ms a step: naive, torch, fused | fused is faster than naive, torch "
        "| MiB at the peak: naive, torch, fused |",
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
    parser.add_argument("--preset", help="default: the kind's first")
    parser.add_argument("--contexts", type=int, nargs="+", help="default: the preset's")
    parser.add_argument("--tokens", type=int, help="batch x context; default: the preset's batch")
    parser.add_argument("--precision", choices=get_args(Precision), default="float32")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each context")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    named = PRESETS[args.kind]
    preset = args.preset or next(iter(named))
    provenance = Provenance.now()
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
        new, left_out = steps_of(config, model, provenance, Budget(args.seconds))
        rows += new
        for path, reason in left_out.items():
            print(f"context {context}: {path} is left out: {reason}")
        print(*table(new)[2:], sep="\n", flush=True)
    folder = RECORDED / rows[0].device if args.record else ROOT / "build" / "benchmarks"
    append(folder / FILE, rows)
    print("", *table(rows), "", f"rows: {folder / FILE}", sep="\n")


if __name__ == "__main__":
    main()
