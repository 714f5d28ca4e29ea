"""The command `translate`: translates texts with a trained translator."""

from __future__ import annotations

import argparse
import sys

from .common import add_attention, add_checkpoint, check_text, decoded
from .errors import UserError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "translate",
        help="translate texts with a trained translator",
        description="Prints one translation per text. A translator trained on the default data "
        'converts numbers and dates: try "words: 1,204" or '
        '"figures: one thousand two hundred and four".',
    )
    parser.add_argument(
        "text", nargs="*", help="texts to translate (default: the lines of standard input)"
    )
    add_checkpoint(parser, "translator")
    add_attention(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..models import Translator
    from ..training import Tokens, load_model
    from ..training.data import BEGIN, END
    from .error_mapping import as_user_error

    for text in args.text:
        check_text("text", text)
    with as_user_error(OSError, ValueError, ImportError):
        trained = load_model(
            args.checkpoint, "translator", attn_implementation=args.attn_implementation
        )
        tokens = Tokens.from_json(trained.extra["tokens"])
    model = trained.model
    assert isinstance(model, Translator)
    for text in args.text or _lines_of_stdin():
        with as_user_error(ValueError, ImportError):
            (generated,) = model.translate(
                tokens.encode(text)[None], begin=BEGIN, end=END, most=model.context - 1
            )
        print(decoded(tokens, generated).decode("utf-8", "replace"))
    return 0


def _lines_of_stdin() -> list[str]:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input must be UTF-8 text: {error.reason}") from None
    check_text("standard input", text)
    return text.splitlines()
