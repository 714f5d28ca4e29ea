"""The command `evaluate`: bits per byte of a trained language model on held-out text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_kernels.cli.common import add_attention, add_checkpoint
from transformer_kernels.cli.error_mapping import as_user_error
from transformer_kernels.cli.errors import UserError

if TYPE_CHECKING:
    from transformer_kernels.models import TransformerXLConfig
    from transformer_kernels.training import LoadedModel

_KINDS = ("transformer-xl", "sparse", "generator")
_MEMORY_OPTIONS = ("memory", "clamp", "same_length")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="bits per byte of a trained byte-level language model on held-out text",
        description="Prints the bits per byte of a model on the held-out part of a text, its last "
        "tenth. The part is cut into lanes, which are read side by side, segment by segment. A "
        "Transformer-XL carries memories along its lanes; their length may differ from that in "
        "training. Segments of a Sparse Transformer may be longer than its context.",
    )
    add_checkpoint(parser, *_KINDS)
    parser.add_argument(
        "--memory",
        type=int,
        nargs="+",
        metavar="N",
        help="lengths of the memory, evaluated one after the other (default: as in training)",
    )
    parser.add_argument(
        "--clamp",
        type=int,
        metavar="N",
        help="largest distinct distance; larger ones have its encoding (default: as in training)",
    )
    parser.add_argument(
        "--same-length",
        action="store_const",
        const=True,
        help="every byte sees as many positions as the memory has, not all before it",
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="length of a segment (default: as in training)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="text, any file (default: that of the training)"
    )
    parser.add_argument(
        "--lanes", type=int, default=16, metavar="N", help="number of lanes (default: 16)"
    )
    parser.add_argument(
        "--bytes",
        type=int,
        metavar="N",
        help="most bytes to read, rounded to whole segments of all lanes (default: all)",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="torch device (default: cpu)"
    )
    add_attention(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from transformer_kernels.nn.options import check_positive
    from transformer_kernels.training import ByteLanes, evaluate, load_corpus, load_model

    with as_user_error(OSError, ValueError):
        trained = load_model(
            args.checkpoint,
            *_KINDS,
            attn_implementation=args.attn_implementation,
            device=args.device,
        )
        configs = _configs(args, trained)
        context = trained.task.model.context if args.context is None else args.context
        data = ByteLanes(load_corpus(args.data or trained.source), context)
        check_positive("lanes", args.lanes)
        segments = None
        if args.bytes is not None:
            check_positive("bytes", args.bytes)
            segments = max(1, args.bytes // (args.lanes * context))
        for label, config in configs.items():
            trained.model.config = config
            result = evaluate(
                trained.task, trained.model, data, lanes=args.lanes, segments=segments
            )
            print(f"{label}{result.score:.3f} {trained.task.score_name}", flush=True)
    print(f"{result.tokens:,} bytes of the held-out part of {data.name}, segments of {context}")
    return 0


def _configs(args: argparse.Namespace, trained: LoadedModel) -> dict[str, Any]:
    """Configs to evaluate, by the beginnings of their lines."""
    from dataclasses import replace

    task = trained.task
    given = {name: getattr(args, name) for name in _MEMORY_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    if task.kind != "transformer-xl":
        if given:
            option = next(iter(given)).replace("_", "-")
            raise UserError(f"--{option} needs a checkpoint of a transformer-xl, got a {task.kind}")
        return {"": task.model}
    lengths = given.pop("memory", [task.model.memory])
    width = max(len(str(length)) for length in lengths)
    config: TransformerXLConfig = task.model
    return {
        f"memory {length:>{width}}: ": replace(config, memory=length, **given) for length in lengths
    }
