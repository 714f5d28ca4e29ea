"""The command `classify`: which class texts belong to."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformer_kernels.cli.common import add_attention, add_checkpoint, texts_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("classify", help="tell which class texts belong to")
    parser.add_argument(
        "file", type=Path, nargs="*", help="a text each (default: the standard input)"
    )
    add_checkpoint(parser, "classifier")
    add_attention(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from transformer_kernels.cli.error_mapping import as_user_error
    from transformer_kernels.training import Tokens, load_model

    with as_user_error(OSError, ValueError):
        trained = load_model(
            args.checkpoint, "classifier", attn_implementation=args.attn_implementation
        )
        tokens = Tokens.from_json(trained.extra["tokens"])
        texts = texts_of(args.file)
    for name, text in texts:
        read = tokens.encode(text)[: trained.task.model.context]
        with torch.no_grad():
            odds = trained.model(read[None])[0].exp()
        best = int(odds.argmax())
        print(f"{name}: {trained.extra['classes'][best]} ({odds[best]:.2f})")
    return 0
