"""Options shared by the commands that use a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from ..training import Tokens


def add_checkpoint(parser: argparse.ArgumentParser, *kinds: str) -> None:
    commands = " or ".join(f"`train {kind}`" for kind in kinds)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        required=True,
        help=f"checkpoint file written by {commands}",
    )


def add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attn-implementation",
        choices=("eager", "fused", "sdpa"),
        default="fused",
        help="attention implementation: eager (bmm, softmax, bmm in plain torch), fused (the "
        "kernels of this package) or sdpa (torch's scaled_dot_product_attention); "
        "default: %(default)s",
    )


def check_text(name: str, text: str) -> None:
    """Raises UserError unless a text from the command line or standard input is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} must be UTF-8 text, got {text[:60]!a}") from None


def decoded(tokens: Tokens, numbers: Iterable[int]) -> bytes:
    """Decodes generated tokens. A model may have more than its tokenizer, which stand for ''."""
    return tokens.decode(number for number in numbers if number < tokens.vocabulary)


def read_texts(files: Sequence[Path]) -> list[tuple[str, bytes]]:
    """Returns (name, content) of each file, or of standard input if there are none.

    Raises:
        OSError: a file cannot be read.
    """
    if not files:
        return [("standard input", sys.stdin.buffer.read())]
    return [(str(file), file.read_bytes()) for file in files]
