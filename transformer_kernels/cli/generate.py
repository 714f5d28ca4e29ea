"""The command `generate`: text from a trained model."""

from __future__ import annotations

import argparse
import codecs

from transformer_kernels.cli.common import add_attention, add_checkpoint
from transformer_kernels.cli.error_mapping import as_user_error


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("generate", help="write text with a trained generator or GPT-2")
    add_checkpoint(parser, "generator", "gpt2")
    parser.add_argument(
        "--prompt",
        default="\n",
        metavar="TEXT",
        help="what to go on from; the model sees the end of it, as far as its context reaches "
        "(default: a line break)",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=500,
        metavar="N",
        help="tokens to write, which are bytes of a generator (default: 500)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.5,
        metavar="T",
        help="0 takes the likeliest token, 1 the model's own odds (default: 0.5)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="decides the draws (default: 0)"
    )
    add_attention(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from transformer_kernels.models.generation import LanguageModel, generate
    from transformer_kernels.nn.options import check_seed
    from transformer_kernels.training import Tokens, load_model

    with as_user_error(OSError, ValueError, ImportError):
        check_seed(args.seed)
        trained = load_model(
            args.checkpoint, "generator", "gpt2", attn_implementation=args.attn_implementation
        )
        model = trained.model
        assert isinstance(model, LanguageModel)
        tokens = Tokens.from_json(trained.extra["tokens"]) if trained.extra else Tokens()
        following = generate(
            model,
            tokens.encode(args.prompt.encode("utf-8", "surrogateescape")).tolist(),
            args.length,
            temperature=args.temperature,
            generator=torch.Generator().manual_seed(args.seed),
        )
    # A character may span several tokens, and a model may write bytes that are none.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(args.prompt, end="", flush=True)
    for token in following:
        print(decoder.decode(tokens.decode([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))
    return 0
