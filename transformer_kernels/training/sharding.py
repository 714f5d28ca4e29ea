"""Parameters divided over processes (torch's `fully_shard`), and this rank's shards of tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..nn.blocks import Stack


def shard_parameters(model: nn.Module, device: torch.device, world_size: int) -> None:
    """Divides the parameters over all processes, in-place, and moves them to the device.

    Each block of a `Stack` gathers its parameters for its forward and its backward pass; the other
    parameters are gathered together. Gradients are averaged over the processes, and each keeps that
    of its shards. A collective.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size,))
    for stack in [module for module in model.modules() if isinstance(module, Stack)]:
        for block in stack:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(x: Tensor) -> Tensor:
    """The undivided tensor of a divided one; others as they are. A collective."""
    from torch.distributed.tensor import DTensor

    y: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return y


def own_shard(x: Tensor) -> Tensor:
    """This rank's shard of a divided tensor, a view of it; others as they are."""
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x


def from_own_shard(shard: Tensor, like: Tensor) -> Tensor:
    """The tensor, divided like `like`, of which `shard` is this rank's."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard.to(like.device), like.device_mesh, like.placements,
        run_check=False, shape=like.shape, stride=like.stride(),
    )  # fmt: skip


def from_whole(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, divided like `like`. Needs no communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return x
    return distribute_tensor(
        x.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
