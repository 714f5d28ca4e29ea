"""The command `bench`: measures attention on the user's own shapes, masks and models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ..bench import Direction, Variant
    from ..bench.comparison.run import Call, Comparison
    from ..bench.contenders import Measured

SHAPE = "1,8,8,1024,1024,64"
DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
PASSES: dict[str, Direction] = {"forward": "fwd", "backward": "bwd", "both": "fwd+bwd"}
MASKS = (
    "full, causal, window:W (a query sees itself and the W - 1 keys before it), padding:LENGTHS "
    "(keys of each sequence), document:LENGTHS (packed documents); LENGTHS are numbers separated "
    "by commas, or a file of numbers; + joins two, as in causal+document:700,1348; can be repeated "
    "(default: causal)"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure attention on your own shapes, masks or model, against other implementations",
        description="Measures attention on your own shapes, masks or model: checks every "
        "implementation against float64, then measures memory and, in turns, time. Measurements "
        "during which the machine was disturbed are repeated, up to three times.",
        epilog="Example: transformer-kernels bench --shape 1,32,8,2048,2048,128 --mask window:256",
    )
    _add_calls(parser)
    parser.add_argument(
        "--against",
        metavar="NAMES",
        help="implementations to compare with, separated by commas (default: all that run here)",
    )
    parser.add_argument(
        "--device", choices=DEFAULT_DTYPES, default="cpu", help="default: %(default)s"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="number of CPU threads (default: torch's)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="time for each call and pass, for all implementations (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=5.0,
        metavar="PERCENT",
        help="how much slower than usual the machine may be during a measurement, before it is "
        "repeated (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/bench"),
        metavar="DIR",
        help="folder of report.html and rows.csv; overwritten (default: %(default)s)",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the run, to compare with")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="print what became slower or faster since a saved run; of two saved runs, without "
        "measuring",
    )
    parser.set_defaults(run=run)


def _add_calls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        action="append",
        metavar="B,H_q,H_kv,M,N,D",
        help=f"sizes of a call, and D_v if it is not D; can be repeated (default: {SHAPE})",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="config.json of a HuggingFace model: its prefill and a step of decoding, instead of "
        "--shape and --mask",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences, with --model")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens, with --model (default: 2048, or the model's positions if they are fewer)",
    )
    parser.add_argument("--mask", action="append", metavar="MASK", help=MASKS)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        action="append",
        help="data type; can be repeated (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--pass",
        choices=PASSES,
        action="append",
        dest="passes",
        help="both is forward and backward together; can be repeated (default: forward, both)",
    )


def run(args: argparse.Namespace) -> int:
    from ..bench.comparison.saved import load
    from ..common.optional_deps import require
    from .common import UserError, as_user_error

    with as_user_error(ImportError):
        require("rich", extra="bench")
        require("jinja2", extra="bench")
    with as_user_error(OSError, ValueError):
        saved = [load(path) for path in args.compare or ()]
    if len(saved) > 2:
        raise UserError(f"--compare takes one or two saved runs, got {len(saved)}")
    if len(saved) == 2:
        from rich.console import Console

        from ..bench.comparison.table import print_changes

        before, after = saved
        print_changes(before, after, Console(highlight=False))
        return 0
    return _measure_and_report(args, *saved)


def _measure_and_report(args: argparse.Namespace, *earlier: list[Measured]) -> int:
    from rich.console import Console

    from ..bench import write_rows
    from ..bench.comparison.page import write_page
    from ..bench.comparison.saved import save
    from ..bench.comparison.table import print_changes, print_results
    from .common import as_user_error

    with as_user_error(OSError):
        args.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    comparison = _measure(args, console)
    print_results(comparison, console)
    page, rows = args.out / "report.html", args.out / "rows.csv"
    with as_user_error(OSError):
        write_page(comparison, page)
        write_rows(rows, [one.row for one in comparison.measured])
        if args.save is not None:
            save(args.save, comparison.measured)
    for measured in earlier:
        print_changes(measured, comparison.measured, console)
    console.print(f"\n{page}\n{rows}", markup=False, soft_wrap=True)
    return 1 if any(result.broken for _, result in comparison.results) else 0


def _measure(args: argparse.Namespace, console: Console) -> Comparison:
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..bench import Budget
    from ..bench.comparison.run import compare
    from ..bench.trial import DeviceLostError
    from .common import as_user_error

    with as_user_error(OSError, ValueError):
        device = _device(args)
        calls, variants = _calls(args, device), _variants(args, device)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("limits of the machine", total=len(calls) + 1)

        def on_call(call: Call) -> None:
            progress.update(task, description=escape(str(call)), advance=1)

        with as_user_error(DeviceLostError):
            return compare(
                calls,
                variants,
                budget=Budget(args.seconds, most=200),
                tolerance=args.tolerance / 100,
                on_call=on_call,
            )


def _device(args: argparse.Namespace) -> torch.device:
    """Checks the settings of the run, and applies the number of threads.

    Raises:
        ValueError: a setting is not valid.
    """
    import torch

    if not 0 < args.seconds < float("inf"):
        raise ValueError(f"--seconds must be positive and finite, got {args.seconds}")
    if not args.tolerance > 0:
        raise ValueError(f"--tolerance must be positive, got {args.tolerance}")
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device")
    return torch.device(args.device)


def _calls(args: argparse.Namespace, device: torch.device) -> list[Call]:
    """Raises OSError or ValueError for input that is not valid."""
    import torch

    from ..bench.comparison.masks import MaskOption
    from ..bench.comparison.model_config import ModelCall, model_calls
    from ..bench.comparison.run import Call
    from ..bench.comparison.shapes import Shape

    if args.model is not None:
        if args.shape or args.mask:
            raise ValueError("--model has its own shapes and masks: give it or --shape and --mask")
        kinds = model_calls(args.model, batch=args.batch, context=args.context)
    else:
        if args.batch != 1 or args.context is not None:
            raise ValueError("--batch and --context need --model")
        masks = [MaskOption.parse(text) for text in args.mask or ("causal",)]
        shapes = [Shape.parse(text) for text in args.shape or (SHAPE,)]
        kinds = [ModelCall("", shape, mask, True) for shape in shapes for mask in masks]
    directions = tuple(PASSES[name] for name in dict.fromkeys(args.passes or ("forward", "both")))
    calls = [
        Call(
            name=kind.name,
            shape=kind.shape,
            mask=kind.mask,
            dtype=getattr(torch, dtype),
            device=device,
            directions=directions if kind.trains else ("fwd",),
        )
        for dtype in dict.fromkeys(args.dtype or [DEFAULT_DTYPES[device.type]])
        for kind in kinds
    ]
    for call in calls:
        call.case()
    return calls


def _variants(args: argparse.Namespace, device: torch.device) -> list[Variant]:
    """Ours, and the peers asked for.

    Raises:
        ValueError: a name is unknown, or its implementation does not run here.
    """
    from ..bench import VARIANTS, usable_variants

    usable = usable_variants(device=device)
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
            raise ValueError(f"--against {name}: not on {device.type}: {reason}")
    return [variant for variant in usable if not variant.is_peer or variant.name in asked]
