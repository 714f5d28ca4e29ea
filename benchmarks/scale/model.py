"""Predicts the cost of context parallelism: python -m benchmarks.scale.model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.scale.prediction import MACHINES, Call, Machine, Prediction, predict
from transformer_kernels.distributed.sequence import SequenceLayout

SUFFIXES = {"k": 1 << 10, "M": 1 << 20}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

HEADER = (
    f"{'tokens':>7} {'ranks':>5}  {'method':22} {'':^7} {'forward':^7} {'':^6}  "
    f"{'forward + backward':^44}\n"
    f"{'':7} {'':5}  {'':22} {'ms':>9} {'eff.':>5} {'GiB':>6}  "
    f"{'ms':>9} {'eff.':>5} {'GiB':>6} {'GB near':>8} {'GB far':>8}  {'imbal.':>6}"
)
LEGEND = """\
method    ring R; all-to-all U; R x U: a ring of R groups of U ranks, which exchange heads
ms        time of the slowest rank
eff.      time of the computation alone, divided equally over the ranks, / time
GiB       memory of a rank
GB near   sent by the busiest rank within its node; far: to other nodes
imbal.    visible pairs of the rank with most / their mean"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status. `argv`: default, those of the process."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        machine = _machine(args)
        lines = [line for S in args.seq for P in args.ranks for line in _rows(args, machine, S, P)]
    except ValueError as error:
        parser.error(str(error))
    mask = "causal" if args.mask == "causal" else "full"
    if args.window is not None:
        mask = f"{mask if mask == 'causal' else 'two-sided'} window of {args.window}"
    print(
        f"H_q = {args.heads}, H_kv = {args.kv_heads}, D = {args.head_dim}, {args.dtype}, mask: "
        f"{mask}\n{machine.ranks_per_node} ranks a node, {machine.within:g} GB/s within and "
        f"{machine.between:g} GB/s between nodes, {machine.latency:g} us a message, "
        f"{machine.forward:g} TFLOP/s forward, {machine.backward:g} backward\n"
    )
    print("\n".join([HEADER, *lines, "", LEGEND]))
    return 0


def _rows(args: argparse.Namespace, machine: Machine, S: int, ranks: int) -> Iterator[str]:
    """Yields the lines of a sequence and a number of ranks; methods that do not fit, with why."""
    for name, ring, heads, layout in _methods(args, machine, ranks):
        start = f"{shown(S):>7} {ranks:>5}  {name:22} "
        try:
            call = Call(
                S=S, H_q=args.heads, H_kv=args.kv_heads, D=args.head_dim, ring=ring, heads=heads,
                layout=layout, causal=args.mask == "causal", window=args.window,
                dtype=DTYPES[args.dtype], B=args.batch,
            )  # fmt: skip
        except ValueError as error:
            if ring > 1 and heads == 1:
                raise
            yield f"{start}not possible: {_reason(call_error=error)}"
            continue
        yield start + _numbers(predict(call, machine))


def _methods(
    args: argparse.Namespace, machine: Machine, ranks: int
) -> list[tuple[str, int, int, SequenceLayout]]:
    """Returns (name, ranks of the ring, ranks for heads, layout)."""
    rows: list[tuple[str, int, int, SequenceLayout]] = [
        (f"ring {ranks} {layout}", ranks, 1, layout) for layout in args.layouts
    ]
    grids = args.grids or [machine.ranks_per_node, args.heads]
    rows += [
        (f"{ranks // U} x {U} {layout}", ranks // U, U, layout)
        for U in dict.fromkeys(grids)
        for layout in args.layouts
        if ranks % U == 0 and 1 < U < ranks
    ]
    if ranks > 1:
        rows.append((f"all-to-all {ranks}", 1, ranks, "contiguous"))
    return rows


def _reason(call_error: ValueError) -> str:
    text = str(call_error)
    return "too few heads" if text.startswith("heads") else text


def _numbers(one: Prediction) -> str:
    forward, both = one.forward, one.both
    return (
        f"{forward.seconds * 1e3:9.2f} {forward.efficiency:5.2f} {forward.memory / 2**30:6.2f}  "
        f"{both.seconds * 1e3:9.2f} {both.efficiency:5.2f} {both.memory / 2**30:6.2f} "
        f"{both.sent_within / 1e9:8.3f} {both.sent_between / 1e9:8.3f}  {one.imbalance:6.2f}"
    )


def _machine(args: argparse.Namespace) -> Machine:
    names = (
        "ranks_per_node", "within", "between", "latency", "forward", "backward", "passes", "launch",
        "processors",
    )  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(MACHINES[args.machine], **given, overlap=not args.no_overlap)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.model",
        description="Predicts time, messages and memory of one attention layer whose sequence is "
        "divided over ranks: a ring, an all-to-all exchange of heads, and grids of both.",
    )
    add = parser.add_argument
    add("--seq", type=count, nargs="+", required=True, help="tokens: 8192, 128k = 128 * 1024, 1M")
    add("--ranks", type=count, nargs="+", required=True, help="numbers of ranks")
    add("--heads", type=int, default=32, help="H_q")
    add("--kv-heads", type=int, default=8, help="H_kv")
    add("--head-dim", type=int, default=128, help="D")
    add("--batch", type=int, default=1, help="B")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16")
    add("--mask", choices=("causal", "full"), default="causal")
    add("--window", type=count, help="keys before its own that a query sees; full: also after it")
    layouts = ("zigzag", "contiguous")
    add("--layouts", nargs="+", choices=layouts, default=["zigzag"])
    add("--grids", type=int, nargs="+", help="ranks U of R x U; default: those of a node, and H_q")
    add("--machine", choices=tuple(MACHINES), default="h100", help="rates that are not given")
    add("--ranks-per-node", type=int)
    add("--within", type=float, help="GB/s of a rank within a node, in each direction")
    add("--between", type=float, help="GB/s of a rank between nodes, in each direction")
    add("--latency", type=float, help="microseconds of a message")
    add("--forward", type=float, help="TFLOP/s of the forward kernel on visible pairs")
    add("--backward", type=float, help="TFLOP/s of the backward kernel on visible pairs")
    add("--passes", type=float, help="GB/s of elementwise operations")
    add("--launch", type=float, help="microseconds of a rectangle without pairs")
    add("--processors", type=int, help="processors that the ranks of a node share")
    add("--no-overlap", action="store_true", help="messages take the processors that compute")
    return parser


def count(text: str) -> int:
    """Reads a positive number with a suffix k or M."""
    factor = SUFFIXES.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"must be a number such as 8192, 128k or 1M, got {text!r}")
    return int(digits) * factor


def shown(value: int) -> str:
    """Writes a number as `count` reads it."""
    for suffix, factor in reversed(SUFFIXES.items()):
        if value % factor == 0:
            return f"{value // factor}{suffix}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
