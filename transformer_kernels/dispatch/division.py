"""Division of sequences over processes, as a state of this process.

`distributed.context_parallel` sets it. While it is set, `attention` gets shards and computes the
result of the undivided sequence; operators that cannot do this raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Division(Protocol):
    """Tokens of a sequence, divided over the ranks of a process group."""

    @property
    def ranks(self) -> int:
        """Number of ranks that a sequence is divided over."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Returns (o, lse) of `attention` of shards; options are all of its options."""

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's tokens of a tensor that every rank has."""

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Returns the undivided tensor of the shards of all ranks."""

    def positions(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Returns the indices of this rank's `count` tokens in the sequence, int64 (count,)."""


current: Division | None = None
"""The division in effect. Process-wide: threads of autograd recompute activations under it too."""

watchers: list[Callable[[], AbstractContextManager[object]]] = []
"""Contexts that `divided` enters too, in which integrations check what runs."""


@contextmanager
def divided(division: Division | None) -> Iterator[None]:
    """Context in which `division` is in effect."""
    global current
    before, current = current, division
    try:
        with ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(watcher())
            yield
    finally:
        current = before


def check_undivided(name: str) -> None:
    """Raises ValueError, where a sequence is divided over several ranks, for a function that does
    not support it."""
    if current is not None and current.ranks > 1:
        raise ValueError(f"{name} does not run on a divided sequence (context_parallel)")


def token_positions(count: int, device: torch.device | str | None = None) -> Tensor:
    """Returns the positions of `count` tokens in their sequence: 0 to count - 1, or those of this
    rank's shard. int64 (count,)."""
    if current is None:
        return torch.arange(count, device=device)
    return current.positions(count, device)


def own_tokens(x: Tensor, dim: int) -> Tensor:
    """Returns this rank's tokens of a tensor that every rank has: all, without a division."""
    return x if current is None else current.shard(x, dim)
