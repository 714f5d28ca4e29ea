"""The command `tune`: times every Triton tile on the local GPU."""

from __future__ import annotations

import argparse

from ..backends.triton.config import WIDTHS, Kernel

KERNELS: tuple[Kernel, ...] = ("forward", "bwd_dkdv", "bwd_dq")
DTYPES = ("bfloat16", "float16", "float32")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="time every Triton tile on this machine's GPU",
        description="Times every tile of the Triton kernels on this machine's GPU. Prints "
        "each tile in the notation of the tile table (config.py), with its median time.",
    )
    parser.add_argument(
        "--kernel", choices=KERNELS, action="append", help="kernel; can be repeated (default: all)"
    )
    parser.add_argument(
        "--width",
        type=int,
        choices=WIDTHS,
        action="append",
        help="head dimension, D and D_v; can be repeated (default: 64 and 128)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        action="append",
        help="data type; can be repeated (default: bfloat16)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="timing budget for each kernel, dtype and width (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from ..backends.triton import target
    from ..bench import tune
    from .common import UserError

    device = torch.device("cuda")
    reason = target.reason_against(device)
    if reason is not None:
        raise UserError(f"tune needs a GPU that Triton can run on: {reason}")
    if not 0 < args.seconds < float("inf"):
        raise UserError(f"--seconds must be positive and finite, got {args.seconds}")
    for name in args.dtype or DTYPES[:1]:
        dtype = getattr(torch, name)
        for width in args.width or (64, 128):
            kernels: tuple[Kernel, ...] = args.kernel or KERNELS
            for kernel in kernels:
                print(f"{target.chip(device).name} {kernel} {name} {width}", flush=True)
                results = tune.tune(
                    kernel, dtype, tune.shape_for(width), device, seconds=args.seconds
                )
                for result in results:
                    print(f"  {result}", flush=True)
    return 0
