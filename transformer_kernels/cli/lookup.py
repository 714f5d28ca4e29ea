"""The command `lookup`: finds the fact that answers a question."""

from __future__ import annotations

import argparse

from .common import add_attention, add_checkpoint, check_text


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "lookup",
        help="find the fact that answers a question, with a trained lookup table",
        description="The first line is the answer, by hard attention (the best row). The lines "
        "below are the rows with the largest soft attention weights.",
    )
    parser.add_argument("question", nargs="+", help="words of the question")
    add_checkpoint(parser, "lookup")
    parser.add_argument(
        "--rows",
        type=int,
        default=3,
        metavar="N",
        help="number of rows to show by soft attention weight (default: 3)",
    )
    add_attention(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from ..models import Lookup
    from ..nn.options import check_positive
    from ..training import load_model
    from ..training.tasks.lookup import facts_from_extra
    from .error_mapping import as_user_error

    for word in args.question:
        check_text("question", word)
    with as_user_error(OSError, ValueError):
        check_positive("rows", args.rows)
        trained = load_model(
            args.checkpoint, "lookup", attn_implementation=args.attn_implementation
        )
        facts = facts_from_extra(trained.extra)
    model = trained.model
    assert isinstance(model, Lookup)
    words = facts.words(" ".join(args.question))[None]
    print(facts.facts[int(model.answer(words))].value)
    with torch.no_grad():
        weights = model(words)[0].exp()
    for weight, row in zip(*weights.topk(min(args.rows, len(weights))), strict=True):
        print(f"  {weight:.2f}  {facts.facts[int(row)].value}")
    return 0
