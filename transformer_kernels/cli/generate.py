"""The command `generate`: text from a trained generator."""

from __future__ import annotations

import argparse
import codecs
from pathlib import Path

from transformer_kernels.cli.conversion import as_user_error


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("generate", help="write text with a trained generator")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", required=True, help="what training saved"
    )
    parser.add_argument(
        "--prompt",
        default="\n",
        metavar="TEXT",
        help="what to go on from; the model sees the end of it, as far as its context reaches "
        "(default: a line break)",
    )
    parser.add_argument(
        "--length", type=int, default=500, metavar="N", help="bytes to write (default: 500)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.5,
        metavar="T",
        help="0 takes the likeliest byte, 1 the model's own odds (default: 0.5)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="decides the draws (default: 0)"
    )
    parser.add_argument(
        "--attention",
        choices=("naive", "fused", "torch"),
        default="fused",
        help="how attention is computed (default: fused)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from transformer_kernels.nn.options import check_seed
    from transformer_kernels.training import load_generator

    with as_user_error(OSError, ValueError):
        check_seed(args.seed)
        generator = torch.Generator().manual_seed(args.seed)
        model = load_generator(args.checkpoint, attention=args.attention)
        following = model.stream(
            args.prompt.encode("utf-8", "surrogateescape"),
            args.length,
            temperature=args.temperature,
            generator=generator,
        )
    # A character may span several bytes, and a model may write bytes that are none.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(args.prompt, end="", flush=True)
    for byte in following:
        print(decoder.decode(bytes([byte])), end="", flush=True)
    print(decoder.decode(b"", final=True))
    return 0
