"""The command `bench`: measures attention on the user's own shapes, masks and models."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .common import add_number, as_user_error

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench import Direction, Variant
    from ..bench.comparison.calls import Call
    from ..bench.comparison.run import Comparison

SHAPE = "1,8,8,1024,1024,64"
DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
PASSES: dict[str, Direction] = {"forward": "fwd", "backward": "bwd", "both": "fwd+bwd"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure attention on your own shapes, masks or model, against other implementations",
        description="Measures attention on your own shapes, masks or model: checks every "
        "implementation against float64, then measures memory and, in turns, time. Measurements "
        "during which the machine was disturbed are repeated, up to three times.",
        epilog="Example: transformer-kernels bench --shape 1,32,8,2048,2048,128 --mask window:256",
    )
    add, number = parser.add_argument, partial(add_number, parser)
    # fmt: off
    add("--shape", action="append", metavar="B,H_q,H_kv,M,N,D",
        help=f"sizes of a call, and D_v if it is not D; can be repeated (default: {SHAPE})")
    add("--model", type=Path, metavar="CONFIG",
        help="config.json of a HuggingFace model: its prefill and a step of decoding, instead of "
        "--shape and --mask")
    number("--batch", default=1, help="sequences, with --model")
    number("--context",
           help="tokens, with --model (default: 2048, or the model's positions if they are fewer)")
    add("--mask", action="append", metavar="MASK",
        help="full, causal, window:W (a query sees itself and the W - 1 keys before it), "
        "padding:LENGTHS (keys of each sequence), document:LENGTHS (packed documents); LENGTHS are "
        "numbers separated by commas, or a file of numbers; + joins two, as in "
        "causal+document:700,1348; can be repeated (default: causal)")
    add("--dtype", action="append", choices=("float32", "bfloat16", "float16"),
        help="data type; can be repeated (default: float32 on a CPU, bfloat16 on a GPU)")
    add("--pass", action="append", choices=PASSES, dest="passes",
        help="both is forward and backward together; can be repeated (default: forward, both)")
    add("--against", metavar="NAMES",
        help="implementations to compare with, separated by commas (default: all that run here)")
    add("--device", choices=DEFAULT_DTYPES, default="cpu", help="default: %(default)s")
    number("--threads", help="number of CPU threads (default: torch's)")
    number("--seconds", type=float, default=2.0, metavar="S",
           help="time for each call and pass, for all implementations (default: %(default)s)")
    number("--tolerance", type=float, default=5.0, metavar="PERCENT",
           help="how much slower than usual the machine may be during a measurement, before it is "
           "repeated (default: %(default)s)")
    add("--out", type=Path, default=Path("build/bench"), metavar="DIR",
        help="folder of report.html and rows.csv; overwritten (default: %(default)s)")
    add("--save", type=Path, metavar="FILE", help="save the run, to compare with")
    add("--compare", type=Path, nargs="+", metavar="FILE",
        help="print what became slower or faster since a saved run; of two saved runs, without "
        "measuring")
    # fmt: on
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..common.optional_deps import require

    with as_user_error(ImportError):
        require("rich", extra="bench")
        require("jinja2", extra="bench")

    from rich.console import Console

    from ..bench import write_rows
    from ..bench.comparison.report import print_changes, print_results, write_page
    from ..bench.comparison.saved import load, save

    console = Console(highlight=False)
    with as_user_error(OSError, ValueError):
        saved = [load(path) for path in args.compare or ()]
        if len(saved) > 2:
            raise ValueError(f"--compare takes one or two saved runs, got {len(saved)}")
        if len(saved) == 2:
            before, after = saved
            print_changes(before, after, console)
            return 0
        calls, variants = _calls(args), _variants(args)
        args.out.mkdir(parents=True, exist_ok=True)
    comparison = _measure(args, calls, variants, console)
    print_results(comparison, console)
    page, rows = args.out / "report.html", args.out / "rows.csv"
    with as_user_error(OSError):
        write_page(comparison, page)
        write_rows(rows, [one.row for one in comparison.measured])
        if args.save is not None:
            save(args.save, comparison.measured)
    for before in saved:
        print_changes(before, comparison.measured, console)
    console.print(f"\n{page}\n{rows}", markup=False, soft_wrap=True)
    return 1 if any(result.broken for _, result in comparison.results) else 0


def _measure(
    args: argparse.Namespace, calls: list[Call], variants: list[Variant], console: Console
) -> Comparison:
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..bench import Budget
    from ..bench.comparison.run import compare
    from ..bench.trial import DeviceLostError

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        as_user_error(DeviceLostError),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("limits of the machine", total=len(calls) + 1)
        return compare(
            calls,
            variants,
            budget=Budget(args.seconds, most=200),
            tolerance=args.tolerance / 100,
            on_call=lambda call: progress.update(task, description=escape(str(call)), advance=1),
        )


def _calls(args: argparse.Namespace) -> list[Call]:
    """Applies the number of threads, and returns the calls to measure.

    Raises OSError or ValueError for an option that is not valid.
    """
    import torch

    from ..bench.comparison.calls import Call, Shape, model_calls

    checks = {
        "--seconds must be positive and finite": (args.seconds, 0 < args.seconds < math.inf),
        "--tolerance must be positive": (args.tolerance, args.tolerance > 0),
        "--threads must be at least 1": (args.threads, args.threads is None or args.threads >= 1),
    }
    for rule, (value, is_valid) in checks.items():
        if not is_valid:
            raise ValueError(f"{rule}, got {value}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    directions = tuple(PASSES[name] for name in dict.fromkeys(args.passes or ("forward", "both")))
    if args.model is not None:
        if args.shape or args.mask:
            raise ValueError("--model has its own shapes and masks: give it or --shape and --mask")
        sizes = {"batch": args.batch, "context": args.context}
        kinds = model_calls(args.model, **sizes, directions=directions)
    elif args.batch != 1 or args.context is not None:
        raise ValueError("--batch and --context need --model")
    else:
        shapes = [Shape.parse(text) for text in args.shape or (SHAPE,)]
        kinds = [
            Call(shape=shape, mask=mask, directions=directions)
            for shape in shapes
            for mask in args.mask or ("causal",)
        ]
    dtypes = dict.fromkeys(args.dtype or [DEFAULT_DTYPES[args.device]])
    device = torch.device(args.device)
    calls = [
        replace(kind, dtype=getattr(torch, x), device=device) for x in dtypes for kind in kinds
    ]
    for call in calls:
        call.case()
    return calls


def _variants(args: argparse.Namespace) -> list[Variant]:
    """Ours, and the peers asked for; ValueError for one that does not run here."""
    import torch

    from ..bench import VARIANTS, usable_variants

    usable = usable_variants(device=torch.device(args.device))
    if args.against is None:
        return usable
    peers = [name for name, variant in VARIANTS.items() if variant.is_peer]
    asked = args.against.split(",")
    for name in asked:
        if name not in peers:
            raise ValueError(f"--against: expected names of {', '.join(peers)}, got {name!r}")
        variant = VARIANTS[name]
        if variant not in usable:
            reason = variant.unavailable_reason() or f"it runs on {', '.join(variant.devices)}"
            raise ValueError(f"--against {name}: not on {args.device}: {reason}")
    return [variant for variant in usable if not variant.is_peer or variant.name in asked]
