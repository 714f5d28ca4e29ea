"""Draws rows of the suite `delta`: time and peak memory of a layer over the sequence length.

    python -m benchmarks.report.delta [ROWS] [PICTURE] [--dtype bfloat16]

By default build/benchmarks/delta.csv and docs/images/delta.svg.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.runner.record import ROOT, UNRECORDED, latest
from benchmarks.suites.delta import BY_CHANNEL, CAUSAL, LAYER, TRANSFORMERS
from transformer_kernels.bench import read_rows
from transformer_kernels.bench.pictures import plot_by_length

LABELS = {
    "cpu": "gated_delta_rule",
    f"cpu{BY_CHANNEL}": "gated_delta_rule, by channel",
    "linear": "linear_attention",
    CAUSAL: "causal attention",
    TRANSFORMERS: "transformers",
    f"{TRANSFORMERS}{BY_CHANNEL}": "transformers, by channel",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report.delta",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="?", type=Path, default=UNRECORDED / "delta.csv")
    images = ROOT / "docs" / "images"
    parser.add_argument("picture", nargs="?", type=Path, default=images / "delta.svg")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    rows = [
        row
        for row in latest(read_rows(args.rows))
        if (row.case, row.dtype) == (LAYER.name, args.dtype)
    ]
    if not rows:
        parser.error(f"{args.rows} has no layers in {args.dtype}")
    plot_by_length(rows, args.picture, LABELS)


if __name__ == "__main__":
    main()
