"""What the commands that use a trained model have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def add_checkpoint(parser: argparse.ArgumentParser, *kinds: str) -> None:
    trained = " or ".join(f"train {kind}" for kind in kinds)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", required=True, help=f"what `{trained}` saved"
    )


def add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attn-implementation",
        choices=("eager", "fused", "sdpa"),
        default="fused",
        help="how attention is computed (default: fused)",
    )


def texts_of(files: Sequence[Path]) -> list[tuple[str, bytes]]:
    """The names and contents of the files, or of the standard input. OSError."""
    if not files:
        return [("standard input", sys.stdin.buffer.read())]
    return [(str(file), file.read_bytes()) for file in files]
