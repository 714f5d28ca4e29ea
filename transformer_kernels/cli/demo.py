"""The command `demo`: measures fused attention on this machine and trains a small GPT-2."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import UserError, as_user_error

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..bench import Case, Direction, Row
    from ..nn.options import AttnImplementation
    from ..training import Dataset, Tokens, TrainConfig, TrainResult

PROMPT = b"\n    def"
"""Ends with a whole token: a space belongs to the word after it"""
TEMPERATURE = 0.5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the two parts: attention alone, and a GPT-2 trained with it."""

    lengths: tuple[int, ...]
    """Sequence lengths of the causal float32 cases, batch size 1"""
    masked_length: int
    """Sequence length of the cases with other masks and dtypes; divisible by 8"""
    heads: int
    width: int
    """Head dimension"""
    case_seconds: float
    """Timing budget of a case and direction, shared by all variants"""
    attention_seconds: float = 95.0
    """Time of the first part; cases expected to exceed it are skipped"""
    model: dict[str, int]
    """Changes of the model of the preset `demo` of GPT-2"""
    steps: int
    eager_steps: int
    """Steps in which eager and fused attention alternate, before only the latter trains on"""
    training_seconds: float = 120.0
    """Time after which the training ends"""
    sample_tokens: int


FULL = Sizes(
    lengths=(512, 1024, 2048, 4096), masked_length=2048, heads=8, width=64, case_seconds=1.5,
    model={"vocabulary": 4096, "context": 512}, steps=480, eager_steps=20, sample_tokens=160,
)  # fmt: skip
"""Sizes of `make demo`: two to three and a half minutes on two cores, after its set-up. Training
ends within its time limit, so that the text sample is that of a finished run."""

QUICK = Sizes(
    lengths=(32, 64), masked_length=64, heads=2, width=16, case_seconds=0.1,
    model={"context": 32, "layers": 1, "heads": 2, "width": 16}, steps=6, eager_steps=4,
    sample_tokens=8,
)  # fmt: skip
"""Every part of the demo at toy sizes: a functional check, not a measurement"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="measure fused attention on this machine and train a small GPT-2 with it",
        description="Compares naive, torch SDPA and fused attention in speed, memory and accuracy, "
        "then trains a small GPT-2 with eager and with fused attention. Prints tables; writes CSV "
        "files, pictures and a text sample. Takes three and a half minutes on two CPU cores.",
    )
    # fmt: off
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), metavar="DIR",
        help="output folder; files of an earlier demo are overwritten (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true",
        help="toy sizes, done within seconds: a functional check, not a measurement",
    )
    # fmt: on
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..common.optional_deps import require

    try:
        for package in ("rich", "matplotlib", "tokenizers"):
            require(package, extra="train")
    except ImportError as error:
        raise UserError(f"the demo needs {error}") from None
    out: Path = args.out
    try:  # before minutes of work
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from None
    from rich.console import Console

    from ..backends.native import extension
    from ..info import info

    console, sizes = Console(highlight=False), QUICK if args.quick else FULL
    console.print(str(info()), markup=False, soft_wrap=True)
    missing = extension.unavailable_reason()
    if missing is not None:
        console.print(f"\nNo fused attention: {missing}", markup=False, soft_wrap=True)
    with as_user_error(OSError):  # a full disk
        _show_attention(sizes, out, console)
        _show_training(sizes, out, console, fused=missing is None)
    console.print("\nFiles:")
    for path in sorted(out.iterdir()):
        console.print(f"  {path}", markup=False, soft_wrap=True)
    return 0


def cases(sizes: Sizes) -> list[Case]:
    """Causal float32 attention at each length, masks that hide most pairs, and bfloat16."""
    import torch

    from ..bench import Case
    from ..masks.mask import Mask

    def case(name: str, length: int, **options: Any) -> Case:
        heads, width = sizes.heads, sizes.width
        options |= {"M": length, "N": length, "D": width, "D_v": width}
        return Case(name=name, H_q=heads, H_kv=heads, **options)

    causal = Mask.causal()
    by_length = [case("causal", n, mask=causal, mask_name="causal") for n in sizes.lengths]
    S = sizes.masked_length
    padding = Mask.padding(torch.arange(4, 0, -1) * S // 8)
    documents = Mask.segments(torch.arange(S)[None] // (S // 8)) & causal
    padded = case("padded", S // 2, B=4, mask=padding, mask_name="padding")
    packed = case("packed", S, mask=documents, mask_name="segments and causal")
    half = [
        replace(case("causal", S, mask=causal, mask_name="causal"), dtype=torch.bfloat16),
        replace(packed, dtype=torch.bfloat16),
    ]
    return [*by_length, padded, packed, *half]


def measure(case: Case, seconds: float) -> Iterator[Row]:
    """Yields one row per direction and variant: errors, peak memory, and interleaved times."""
    from .. import bench

    provenance, inputs = bench.Provenance.now(), case.inputs()
    exact = bench.exact_outputs(case, inputs)
    attends = {variant.name: variant.attend_for(case) for variant in bench.usable_variants()}
    outputs = {name: bench.run_once(attend, inputs) for name, attend in attends.items()}
    directions: tuple[Direction, ...] = ("fwd", "fwd+bwd")
    for direction in directions:
        work = {
            name: bench.prepare_work(attend, inputs, direction) for name, attend in attends.items()
        }
        peaks = {name: bench.peak_extra_bytes(prepare) for name, prepare in work.items()}
        timings = bench.Interleaver(work).run(bench.Budget(seconds=seconds, fewest=3, most=20))
        for name in work:
            yield bench.make_row(
                provenance, suite="demo", case=case, direction=direction, variant=name,
                timing=timings[name], peak_bytes=peaks[name],
                error=outputs[name].error(exact, direction),
            )  # fmt: skip


def measure_all(
    todo: Sequence[Case], sizes: Sizes, on_case: Callable[[str], None]
) -> tuple[list[Row], list[str]]:
    """Rows of the cases, cheapest first, and a line for each that would exceed memory or time.

    The time of a case is predicted from the one before, in proportion to the query-key pairs.
    """
    from ..bench.memory import too_large_reason

    end = time.perf_counter() + sizes.attention_seconds
    rows: list[Row] = []
    skipped: list[str] = []
    per_pair = 0.0
    for case in sorted(todo, key=_pairs):
        name = f"{case.name}, {case.dtype_name}, length {case.N}"
        on_case(name)
        start, predicted = time.perf_counter(), per_pair * _pairs(case)
        reason = too_large_reason(case)
        if reason is None and start + predicted >= end:
            reason = f"it would take about {predicted:.0f} s more"
        if reason is not None:
            skipped.append(f"Skipped {name}: {reason}.")
            continue
        rows += measure(case, sizes.case_seconds)
        per_pair = (time.perf_counter() - start) / _pairs(case)
    return rows, skipped


def _pairs(case: Case) -> int:
    return case.B * case.M * case.N


def _show_attention(sizes: Sizes, out: Path, console: Console) -> None:
    from ..bench import memory_can_be_measured, write_rows
    from ..bench.pictures import plot_by_length

    console.rule("attention alone")
    with console.status("measuring") as status:
        rows, skipped = measure_all(
            cases(sizes), sizes, lambda name: status.update(f"measuring {name}")
        )
    by_length = [row for row in rows if (row.case, row.dtype) == ("causal", "float32")]
    others = [row for row in rows if row not in by_length]
    heads = f"{sizes.heads} heads of {sizes.width}"
    console.print(_attention_table(f"causal, float32, {heads}", "length", by_length))
    title = f"length {sizes.masked_length}, {heads}"
    console.print(_attention_table(title, "mask, dtype", others))
    for line in skipped:
        console.print(line)
    console.print(
        "ms: median times, variants interleaved; both: forward + backward. x naive, x SDPA: "
        "speed-up of both.\n"
        "MiB: peak memory beyond q, k and v, including the output and the gradients.\n"
        "error: largest difference from float64, relative to the largest value.\n"
        "packed: eight documents in one row, causal. padded: four rows of half the length, filled "
        "to 4/4, 3/4, 2/4 and 1/4."
    )
    if not memory_can_be_measured():
        console.print("MiB is not shown: this system has no resettable peak-memory counter.")
    write_rows(out / "attention.csv", rows)
    plot_by_length(by_length, out / "attention.png")


def _attention_table(title: str, header: str, rows: Sequence[Row]) -> Table:
    """One line per case and variant; speed-ups, memory and error are those of both directions."""
    from ..bench import VARIANTS
    from ..bench.tables import UNKNOWN, empty_table, milliseconds

    def label(row: Row) -> str:
        return str(row.N) if header == "length" else f"{row.case}, {row.dtype}"

    headers = (header, "variant", "fwd ms", "both ms", "x naive", "x SDPA", "MiB", "error")
    table = empty_table(title, headers, text=("variant", header))
    found = {(label(row), row.variant, row.direction): row for row in rows}
    for name in dict.fromkeys(map(label, rows)):
        variants = [one for one in VARIANTS.values() if (name, one.name, "fwd") in found]
        for number, variant in enumerate(variants):
            both = found[name, variant.name, "fwd+bwd"]
            table.add_row(
                "" if number else name,
                variant.label,
                milliseconds(found[name, variant.name, "fwd"].median_ms),
                milliseconds(both.median_ms),
                *(f"{found[name, peer, 'fwd+bwd'].median_ms / both.median_ms:.1f}"
                  for peer in ("naive", "sdpa")),
                UNKNOWN if both.peak_mib is None else f"{both.peak_mib:.0f}",
                f"{both.error:.0e}",
            )  # fmt: skip
        table.add_section()
    return table


def train_both(
    sizes: Sizes,
    config: TrainConfig,
    data: Dataset,
    names: Sequence[AttnImplementation],
    on_step: Callable[[str], None],
) -> dict[str, TrainResult]:
    """Trains with each attention implementation from the same seed; the last one to the end.

    The runs alternate step by step, which makes their times comparable on a machine whose speed
    drifts.
    """
    from ..training import TrainingRun

    end = time.perf_counter() + sizes.training_seconds
    runs = {
        name: TrainingRun.start(replace(config, attn_implementation=name), data) for name in names
    }
    results: dict[str, TrainResult] = {}
    while (steps := max((len(one.rows) for one in results.values()), default=0)) < config.steps:
        active = names if steps < sizes.eager_steps else names[-1:]
        results |= {name: runs[name].train(should_stop=lambda: True) for name in active}
        losses = (f"{name} {results[name].losses[-1]:.2f}" for name in active)
        on_step(f"training, step {steps + 1} of {config.steps}, loss: {', '.join(losses)}")
        if time.perf_counter() > end:
            break
    return results


def _show_training(sizes: Sizes, out: Path, console: Console, *, fused: bool) -> None:
    from ..bench.tables import UNKNOWN, empty_table
    from ..training import PRESETS, Schedule, plot_curves
    from ..training.curves import rewrite_curve
    from ..training.data import TokenWindows

    preset = PRESETS["gpt2"]["demo"]
    task = replace(preset.task, model=replace(preset.task.model, **sizes.model))
    schedule = Schedule(peak=2e-3, warmup=sizes.steps // 10)
    config = replace(
        preset, task=task, steps=sizes.steps, batch=2, schedule=schedule, eval_every=50,
        eval_batches=8,
    )  # fmt: skip
    console.rule(f"training a small GPT-2, context {task.model.context}, on byte-pair tokens")
    names: tuple[AttnImplementation, ...] = ("eager", "fused") if fused else ("eager",)
    with console.status("training the tokenizer on the standard library") as status:
        data = task.data()
        results = train_both(sizes, config, data, names, status.update)
    headers = ("attention", "steps", "seconds", "ms/step", "bits/byte, held out")
    title = f"{data.name}: {config.batch} x {task.model.context} tokens per step, same seed"
    table = empty_table(title, headers, text=("attention",))
    for name, result in results.items():
        steps, score = len(result.rows), result.score
        table.add_row(
            name, str(steps), f"{result.seconds:.1f}", f"{1e3 * result.seconds / steps:.1f}",
            UNKNOWN if score is None else f"{score:.3f}",
        )  # fmt: skip
        rewrite_curve(out / f"curve-{name}.csv", result.rows)
    console.print(table)
    last = results[names[-1]]
    if not last.finished:
        console.print(f"Stopped after {len(last.rows)} steps: this machine is slow or busy.")
    if fused:
        eager, steps = results["eager"], len(results["eager"].rows)
        off = max(abs(a - b) for a, b in zip(eager.losses, last.losses, strict=False))
        console.print(
            f"Over {steps} interleaved steps, fused attention trained "
            f"{eager.seconds / last.rows[steps - 1].seconds:.2f} times as fast. The losses differ "
            f"by at most {off:.0e}: training amplifies rounding errors."
        )
    plot_curves(
        {name: one.rows for name, one in results.items()}, out / "training.png", score="bits/byte"
    )
    assert isinstance(data, TokenWindows)
    _write_sample(sizes, last, data.tokens, out, console)


def _write_sample(
    sizes: Sizes, result: TrainResult, tokens: Tokens, out: Path, console: Console
) -> None:
    import torch

    from ..models import GPT2
    from ..models.generation import generate

    assert isinstance(result.model, GPT2)
    generated = generate(
        result.model, tokens.encode(PROMPT).tolist(), sizes.sample_tokens, temperature=TEMPERATURE,
        generator=torch.Generator().manual_seed(result.config.seed),
    )  # fmt: skip
    text = (PROMPT + tokens.decode(list(generated))).decode(errors="replace")
    console.rule(f"text sample, temperature {TEMPERATURE}")
    console.print(text, markup=False)
    (out / "sample.txt").write_text(text, encoding="utf-8")
