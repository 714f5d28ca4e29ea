"""The command `translate`: texts by a trained translator."""

from __future__ import annotations

import argparse
import sys

from transformer_kernels.cli.common import add_attention, add_checkpoint


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "translate",
        help="translate texts",
        description='By default a translator learns numbers and dates: "words: 1,204" and '
        '"figures: one thousand two hundred and four" are such texts.',
    )
    parser.add_argument(
        "text", nargs="*", help="to be translated (default: the lines of the standard input)"
    )
    add_checkpoint(parser, "translator")
    add_attention(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from transformer_kernels.cli.error_mapping import as_user_error
    from transformer_kernels.models import Translator
    from transformer_kernels.training import Tokens, load_model
    from transformer_kernels.training.data import BEGIN, END

    with as_user_error(OSError, ValueError):
        trained = load_model(
            args.checkpoint, "translator", attn_implementation=args.attn_implementation
        )
        tokens = Tokens.from_json(trained.extra["tokens"])
    model = trained.model
    assert isinstance(model, Translator)
    for text in args.text or sys.stdin.read().splitlines():
        with as_user_error(ValueError):
            (written,) = model.translate(
                tokens.encode(text)[None], begin=BEGIN, end=END, most=model.context - 1
            )
        print(tokens.decode(written).decode("utf-8", "replace"))
    return 0
