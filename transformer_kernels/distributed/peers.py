"""The processes of a group, and the messages between two of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

_NAMED = 8
"""Largest number of ranks that the error of a collective names."""

Group = dist.ProcessGroup | None
"""A process group; None is the default group."""


@dataclass(frozen=True)
class Peers:
    """The processes of a group. Ranks count within the group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(group: Group, name: str = "group") -> Peers:
        """Raises ValueError unless this process belongs to the group; `name` is the argument's."""
        if not dist.is_initialized():
            raise ValueError(
                f"{name} must be a process group, and torch.distributed is not initialized: start "
                "the processes with torchrun and call torch.distributed.init_process_group"
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            # torch represents a group without this process by an object of its own.
            raise ValueError(f"{name} must be a process group of this process, got {group!r}")
        group = dist.group.WORLD if group is None else group
        assert group is not None
        return Peers(group, dist.get_rank(group), dist.get_world_size(group))

    def alone(self) -> Peers:
        """Returns a group of this process only."""
        return Peers(self.group, 0, 1)

    def name(self, rank: int) -> str:
        """Returns the name of a rank for messages: its number in the default group."""
        return f"rank {dist.get_global_rank(self.group, rank)}"

    def exchange(
        self, *, to: int, sent: Sequence[Tensor], source: int, received: Sequence[Tensor]
    ) -> Exchange:
        """Starts to send tensors to one rank and to receive tensors from one.

        Both ranks list the same tensors in the same order. `sent` must be contiguous, and neither
        list may be written to before `Exchange.wait`.

        Raises as `Exchange.wait`: a message to a rank that has ended fails at once.
        """
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x in sent if x.numel()
        ]
        operations += [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=source)
            for x in received
            if x.numel()
        ]
        with self.naming_ranks(to, source):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Exchange(self, to, source, [*sent, *received], works)

    @contextmanager
    def naming_ranks(self, to: int, source: int) -> Iterator[None]:
        """Names the ranks of an exchange in its errors."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name(self.rank)} waited for {self.name(source)}, which sends, and "
                f"{self.name(to)}, which receives: one of them, or a rank that it waits for, has "
                f"ended or did not answer in time ({error})"
            ) from None

    @contextmanager
    def naming_group(self) -> Iterator[None]:
        """Names the ranks of a collective in its errors."""
        try:
            yield
        except RuntimeError as error:
            others = [self.name(n) for n in range(self.size) if n != self.rank]
            names = ", ".join(others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
            raise RuntimeError(
                f"{self.name(self.rank)} waited for {names}: one of them has ended or did not "
                f"answer in time ({error})"
            ) from None


@dataclass(frozen=True)
class Exchange:
    """Messages that are under way. Holds their tensors until they have arrived."""

    peers: Peers
    to: int
    source: int
    tensors: list[Tensor]
    works: list[Any]

    def wait(self) -> None:
        """Waits for the messages; on a GPU, makes the current stream wait.

        Raises RuntimeError with the names of the ranks if one of them ends, or does not answer
        within the time-out of the process group.
        """
        with self.peers.naming_ranks(self.to, self.source):
            for work in self.works:
                work.wait()
        self.works.clear()
        self.tensors.clear()


def control_group(peers: Peers) -> Peers:
    """Returns the same processes, in a group that sends CPU tensors."""
    if "cpu:" in dist.get_backend_config(peers.group):
        return peers
    group = _CONTROL_GROUPS.get(peers.group)
    if group is None:
        ranks = dist.get_process_group_ranks(peers.group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _CONTROL_GROUPS[peers.group] = group
        if "cuda:" in dist.get_backend_config(peers.group):
            # NCCL: the first operation of a group must have all of its ranks.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=peers.group)
    return Peers(group, peers.rank, peers.size)


_CONTROL_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
