"""Arguments that the operators share, and the checks that all ranks pass the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..backends import BACKENDS
from ..common.argument_checks import check_bool, values_are_readable
from ..dispatch.choose import choose
from ..masks.constraints import BlockSparse, KeyRange
from ..masks.mask import Mask
from ..scores import philox
from ..scores.alibi import Alibi
from ..scores.options import ScoreArguments
from ..scores.relative import Relative
from ..scores.sinks import check_sinks
from .agreement import check_agreement, digest, errors_on_all_ranks
from .peers import Peers
from .rectangles import Undivided, undivided_call
from .sequence import SequenceLayout, check_length, pieces_of

_SHOWN = 8
"""Largest number of values that a description shows."""


class DividedOptions(ScoreArguments, total=False):
    """Options of the operators: those of `transformer_kernels.attention`, and `check`."""

    mask: Mask | None
    sinks: Tensor | None
    backend: str
    check: bool


@dataclass(frozen=True)
class Arguments:
    """The options, with their defaults."""

    mask: Mask | None = None
    bias: Tensor | Alibi | None = None
    relative: Relative | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int | Tensor | None = None
    sinks: Tensor | None = None
    backend: str = "auto"
    check: bool = True

    def call(self, q: Tensor, k: Tensor, v: Tensor, ranks: int) -> Undivided:
        """Validates the call of `ranks` shards; see `undivided_call`."""
        scores: Any = {name: getattr(self, name) for name in ScoreArguments.__annotations__}
        return undivided_call(q, k, v, ranks, mask=self.mask, **scores)


def checked(
    arguments: Arguments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    groups: Sequence[Peers],
    shared: Mapping[str, Tensor] | None = None,
) -> tuple[Arguments, Undivided]:
    """Returns the arguments, with the same dropout seed on all ranks of the groups, and the call.

    `shared` has further tensors, by name, that must have the same values on all ranks.

    Raises before any rank sends keys: TypeError or ValueError for an argument, on all ranks if
    `check` is on; ValueError on all ranks if they differ.
    """
    check_bool("check", arguments.check)
    with errors_on_all_ranks(groups, check=arguments.check):
        call = _valid_call(arguments, q, k, v, layout, groups)
    if arguments.check:
        values = {name: _described(x, by_value=True) for name, x in (shared or {}).items()}
        check_agreement(groups, _description(arguments, q, k, v, layout) | values)
    seed = call.problem.scores.seed
    if seed is not None and arguments.seed is None:
        for peers in groups:
            if peers.size > 1:
                with peers.naming_group():
                    dist.broadcast(seed, group=peers.group, group_src=0)
        arguments = replace(arguments, seed=seed)
    return arguments, call


def _valid_call(
    arguments: Arguments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    groups: Sequence[Peers],
) -> Undivided:
    ranks = math.prod(peers.size for peers in groups)
    call = arguments.call(q, k, v, ranks)
    check_sinks(arguments.sinks, q)
    size, heads = groups[0].size, ranks // groups[0].size
    for name, tokens, length in (("q", "queries", call.M), ("k", "keys", call.N)):
        check_length(f"the length of {name}", length, layout, size, heads)
        piece = pieces_of(layout, length, 0, size)[0]
        if arguments.dropout_p and size > 1 and piece.length % philox.BLOCK:
            raise ValueError(
                f"with dropout, pieces of {tokens} must have a multiple of {philox.BLOCK} tokens, "
                f"got {piece.length} for {length} {tokens} on {size} ranks in the layout {layout!r}"
            )
    choose(call.problem, arguments.backend, BACKENDS)
    return call


def _description(
    arguments: Arguments, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout
) -> dict[str, str]:
    """Describes a valid call by what all ranks must share."""
    given = {"layout": layout, "q": q, "k": k, "v": v} | vars(arguments)
    defaults = vars(Arguments())
    return {
        name: _described(value)
        for name, value in given.items()
        if value is not defaults.get(name) and value is not None
    }


def _described(value: Any, *, by_value: bool = False) -> str:
    """Describes tensors by shape and dtype; those that all ranks have alike by their values too, if
    these are on the CPU."""
    if isinstance(value, Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if value.requires_grad and torch.is_grad_enabled():
            text += " with gradient"
        if not (by_value or value.dim() == 0) or not values_are_readable(value):
            return text
        return f"{text} {value.tolist() if value.numel() <= _SHOWN else f'{digest(value):x}'}"
    if isinstance(value, tuple):
        return f"({', '.join(_described(one) for one in value)})"
    if is_dataclass(value):
        by_value = isinstance(value, KeyRange | BlockSparse)
        parts = (f"{n}={_described(x, by_value=by_value)}" for n, x in vars(value).items())
        return f"{type(value).__name__}({', '.join(parts)})"
    return repr(value)
