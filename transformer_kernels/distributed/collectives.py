"""Differentiable collectives: heads for sequence, and gathered shards. Differentiable to any order.

A loss is taken as a sum over the ranks: the gradient of a gathered shard is summed over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .peers import Peers


def all_to_all(peers: Peers, x: Tensor) -> Tensor:
    """Sends x[n] to rank n; returns the tensors received, (P, ...), by rank."""
    return x if peers.size == 1 else _all_to_all(peers, x)


def all_gather(peers: Peers, x: Tensor) -> Tensor:
    """Returns the tensors of all ranks, concatenated in the first dimension by rank."""
    return x if peers.size == 1 else _all_gather(peers, x)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, x: Tensor) -> Tensor:
        ctx.peers = peers
        x = x.contiguous()
        received = torch.empty_like(x)
        with peers.naming_group():
            dist.all_to_all_single(received, x, group=peers.group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, all_to_all(ctx.peers, grad)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, x: Tensor) -> Tensor:
        ctx.peers = peers
        gathered = x.new_empty(peers.size * x.shape[0], *x.shape[1:])
        with peers.naming_group():
            dist.all_gather(list(gathered.chunk(peers.size)), x.contiguous(), group=peers.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        shares = all_to_all(ctx.peers, grad.unflatten(0, (ctx.peers.size, -1)))
        return None, shares.sum(0)


_all_to_all: Callable[[Peers, Tensor], Tensor] = _AllToAll.apply
_all_gather: Callable[[Peers, Tensor], Tensor] = _AllGather.apply


def heads_for_sequence(peers: Peers, x: Tensor) -> Tensor:
    """(B, H, L, ...), the shard of all heads -> (B, H / P, P L, ...), this rank's heads of the
    shards of all ranks, concatenated by rank."""
    if peers.size == 1:
        return x
    received = all_to_all(peers, x.unflatten(1, (peers.size, -1)).movedim(1, 0))
    return received.movedim(0, 2).flatten(2, 3)


def sequence_for_heads(peers: Peers, x: Tensor) -> Tensor:
    """The inverse of `heads_for_sequence`."""
    if peers.size == 1:
        return x
    received = all_to_all(peers, x.unflatten(2, (peers.size, -1)).movedim(2, 0))
    return received.movedim(0, 1).flatten(1, 2)
