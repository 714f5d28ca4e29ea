"""The command `classify`: predicts the class of each text."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import add_attention, add_checkpoint, read_texts


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "classify",
        help="predict the class of each text with a trained classifier",
        description="Prints the most likely class of each text, and its probability.",
    )
    parser.add_argument(
        "file", type=Path, nargs="*", help="text files, one text each (default: standard input)"
    )
    add_checkpoint(parser, "classifier")
    add_attention(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from ..training import Tokens, load_model
    from .error_mapping import as_user_error

    with as_user_error(OSError, ValueError):
        trained = load_model(
            args.checkpoint, "classifier", attn_implementation=args.attn_implementation
        )
        tokens = Tokens.from_json(trained.extra["tokens"])
        texts = read_texts(args.file)
    for name, text in texts:
        encoded = tokens.encode(text)[: trained.task.model.context]
        with torch.no_grad():
            probabilities = trained.model(encoded[None])[0].exp()
        best = int(probabilities.argmax())
        print(f"{name}: {trained.extra['classes'][best]} ({probabilities[best]:.2f})")
    return 0
