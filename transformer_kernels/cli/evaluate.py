"""The command `evaluate`: score of a trained language model on held-out text or examples."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import add_attention, add_checkpoint
from .error_mapping import as_user_error
from .errors import UserError

if TYPE_CHECKING:
    from ..training import Evaluation, LoadedModel

    _Evaluated = Callable[[], Evaluation]

_ON_TEXT = ("transformer-xl", "sparse", "reformer", "linear", "generator")
_COPIES = ("reformer-copy", "linear-copy")
_KINDS = (*_ON_TEXT, *_COPIES)
_HASHED = ("reformer", "reformer-copy")

_OPTIONS = {
    "memory": ("transformer-xl",),
    "clamp": ("transformer-xl",),
    "same_length": ("transformer-xl",),
    "rounds": _HASHED,
    "context": _ON_TEXT,
    "data": _ON_TEXT,
    "lanes": _ON_TEXT,
    "bytes": _ON_TEXT,
    "examples": _COPIES,
}
"""Kinds of checkpoints that an option applies to"""

_LANES, _EXAMPLES = 16, 1024


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="score of a trained byte-level language model on held-out text",
        description="Prints the bits per byte of a model on the held-out part of a text, its last "
        "tenth. The part is cut into lanes, which are read side by side, segment by segment. A "
        "Transformer-XL carries memories along its lanes; their length may differ from that in "
        "training. Segments of a Sparse Transformer, a Reformer or a Linear Transformer may be "
        "longer than its context. For a checkpoint of `train reformer-copy` or `linear-copy`, "
        "prints the share of symbols that are copied right in held-out examples.",
    )
    add_checkpoint(parser, *_KINDS)
    _add_model_options(parser)
    _add_data_options(parser)
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="torch device (default: cpu)"
    )
    add_attention(parser)
    parser.set_defaults(run=run)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that replace those of the training."""
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
        "--rounds",
        type=int,
        nargs="+",
        metavar="N",
        help="hash rounds of a Reformer, evaluated one after the other (default: as in training)",
    )


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context", type=int, metavar="N", help="length of a segment (default: as in training)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="text, any file (default: that of the training)"
    )
    parser.add_argument(
        "--lanes", type=int, metavar="N", help=f"number of lanes (default: {_LANES})"
    )
    parser.add_argument(
        "--bytes",
        type=int,
        metavar="N",
        help="most bytes to read, rounded to whole segments of all lanes (default: all)",
    )
    parser.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help=f"number of held-out examples to copy (default: {_EXAMPLES})",
    )


def run(args: argparse.Namespace) -> int:
    from ..training import load_model

    with as_user_error(OSError, ValueError):
        trained = load_model(
            args.checkpoint,
            *_KINDS,
            attn_implementation=args.attn_implementation,
            device=args.device,
        )
        kind = trained.task.kind
        for name, kinds in _OPTIONS.items():
            if getattr(args, name) is not None and kind not in kinds:
                raise UserError(
                    f"--{name.replace('_', '-')} needs a checkpoint of a {' or a '.join(kinds)}, "
                    f"got a {kind}"
                )
        configs = _configs(args, trained.task.model)
        evaluated, data = _evaluation(args, trained)
        for label, config in configs.items():
            trained.model.config = config
            result = evaluated()
            print(f"{label}{result.score:.3f} {trained.task.score_name}", flush=True)
    print(f"{result.tokens:,} {data}")
    return 0


def _configs(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Configs to evaluate, by the beginnings of their lines."""
    from dataclasses import replace

    given = {name: getattr(args, name) for name in ("clamp", "same_length")}
    config = replace(config, **{name: value for name, value in given.items() if value is not None})
    for name in ("memory", "rounds"):
        if hasattr(config, name):
            values = getattr(args, name) or [getattr(config, name)]
            width = max(len(str(value)) for value in values)
            return {
                f"{name} {value:>{width}}: ": replace(config, **{name: value}) for value in values
            }
    return {"": config}


def _evaluation(args: argparse.Namespace, trained: LoadedModel) -> tuple[_Evaluated, str]:
    """A function that evaluates the model as it is, and a description of the data.

    Raises:
        OSError, ValueError: an option is out of range, or the data cannot be read.
    """
    from ..nn.options import check_positive
    from ..training import ByteLanes, evaluate, evaluate_examples, load_corpus

    task, model = trained.task, trained.model
    if task.kind not in _ON_TEXT:
        copies = task.data()
        count = _EXAMPLES if args.examples is None else args.examples
        check_positive("examples", count)
        examples = partial(evaluate_examples, task, model, copies, count=count)
        return examples, f"{task.unit} of held-out {copies.name}"
    context = task.model.context if args.context is None else args.context
    text = ByteLanes(load_corpus(args.data or trained.source), context)
    lanes, segments = _LANES if args.lanes is None else args.lanes, None
    check_positive("lanes", lanes)
    if args.bytes is not None:
        check_positive("bytes", args.bytes)
        segments = max(1, args.bytes // (lanes * context))
    return (
        partial(evaluate, task, model, text, lanes=lanes, segments=segments),
        f"bytes of the held-out part of {text.name}, segments of {context}",
    )
