"""Training on several processes: a single process, or those started by torchrun.

The processes form a grid. Each row, of `context_parallel` neighbours, shares the same examples and
divides their sequences; the rows divide the examples of a batch. Parameters may be divided over all
processes (torch's `fully_shard`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.context import context_parallel as divide_sequences
from ..nn.blocks import Stack
from ..nn.options import check_positive
from ..scores import philox
from .config import TrainConfig
from .data import Batch
from .tasks import TASKS

_SHUTDOWN_DELAY = 0.2
"""Seconds between the last collective and the shutdown of the process group"""


@dataclass(frozen=True)
class DistributedContext:
    """Rank of this process among `world_size` processes, and their collectives.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
        context_parallel: number of neighbouring ranks that each sequence is divided over; a divisor
            of `world_size`.
        sharded: parameters, gradients and optimizer states are divided over all ranks.
        context_group: process group of these neighbours; None if each rank has whole sequences.
    """

    rank: int = 0
    world_size: int = 1
    context_parallel: int = 1
    sharded: bool = False
    context_group: distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        check_positive("context_parallel", self.context_parallel)
        if self.world_size % self.context_parallel:
            raise ValueError(
                f"the number of processes must be a multiple of context_parallel, "
                f"{self.context_parallel}, got {self.world_size}"
            )

    @property
    def data_ranks(self) -> int:
        """Number of parts that the examples of a batch are divided into."""
        return self.world_size // self.context_parallel

    @property
    def forward_is_collective(self) -> bool:
        """True if a rank cannot run the model without the others."""
        return self.context_parallel > 1 or self.sharded

    @property
    def is_main(self) -> bool:
        """True for rank 0, which validates, writes files and prints."""
        return self.rank == 0

    def shard(self, batch: Batch) -> Batch:
        """This rank's examples of a batch that is the same on all ranks."""
        first = self.rank // self.context_parallel
        return {name: x[first :: self.data_ranks] for name, x in batch.items()}

    def unshard(self, mine: Batch) -> Batch:
        """The batch that `shard` gave all ranks their examples of. A collective."""
        parts = self.all_gather(mine)[:: self.context_parallel]
        whole = {name: torch.cat([part[name] for part in parts]) for name in mine}
        for name, x in whole.items():
            ranks = [torch.arange(first, len(x), len(parts)) for first in range(len(parts))]
            whole[name] = x[torch.cat(ranks).argsort()]
        return whole

    def divided(self) -> AbstractContextManager[object]:
        """Context of forward and backward passes: it divides their sequences, if at all."""
        if self.context_parallel == 1:
            return nullcontext()
        return divide_sequences(self.context_group)

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Moves the model to the device and makes backward passes average gradients over all ranks.

        Returns:
            the module to call in training: the model, whose parameters are divided in-place if
            `sharded`, or a wrapper of it.
        """
        if self.sharded:
            _shard_parameters(model, device, self.world_size)
            return model
        model.to(device)
        if self.world_size == 1:
            return model
        devices = None if device.type == "cpu" else [device]
        return DistributedDataParallel(model, device_ids=devices)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values

    def all_reduce_sum(self, value: Tensor) -> float:
        """Sum of a scalar tensor over all ranks; `value` is modified in-place."""
        if self.world_size > 1:
            distributed.all_reduce(value)
        return value.item()

    @contextmanager
    def on_all_ranks(self, kind: type[Exception]) -> Iterator[None]:
        """Context that raises an error of this kind on all ranks if it occurs on any.

        The ranks meet at its end: it is also a barrier. The error is that of the lowest such rank.
        """
        error = None
        try:
            yield
        except kind as caught:
            error = caught
        errors = [one for one in self.all_gather(error) if one is not None]
        if errors:
            raise errors[0]


SINGLE_PROCESS = DistributedContext()


def _shard_parameters(model: nn.Module, device: torch.device, world_size: int) -> None:
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


def check_scale_out(config: TrainConfig, grid: DistributedContext) -> None:
    """Raises ValueError unless the work of a run can be divided over these processes.

    The batch may have too few examples; the task, its precision, the length of its sequences or
    its attention may not be divisible.
    """
    if config.batch < config.accumulate * grid.data_ranks:
        raise ValueError(
            f"batch must be at least accumulate times the number of processes"
            f"{'' if grid.context_parallel == 1 else ' that do not share sequences'}, "
            f"{config.accumulate} x {grid.data_ranks}, got {config.batch}"
        )
    if not grid.forward_is_collective:
        return
    if not config.task.scales_out:
        able = ", ".join(kind for kind, task in TASKS.items() if task.scales_out)
        raise ValueError(
            f"the work of one example can be divided over processes for the tasks {able}, got the "
            f"task {config.task.kind}"
        )
    if grid.sharded and config.precision == "float16":
        raise ValueError(
            "precision must be float32 or bfloat16 where parameters are divided over processes, "
            "got float16: use bfloat16"  # each rank would scale its losses on its own
        )
    if grid.context_parallel == 1:
        return
    # sequences are in the layout "zigzag"; see docs/scale.md
    model, dropout = config.task.model, config.task.model.dropout > 0.0
    multiple = 2 * grid.context_parallel * (philox.BLOCK if dropout else 1)
    if model.context % multiple:
        raise ValueError(
            f"context must be a multiple of {multiple} to be divided over {grid.context_parallel} "
            f"processes{' with dropout' if dropout else ''}, got {model.context}"
        )
    if config.attn_implementation == "sdpa":
        raise ValueError(
            "attn_implementation must be 'fused' or 'eager' where sequences are divided over "
            "processes, got 'sdpa'"
        )


def local_device(device: str) -> str:
    """Replaces "cuda" by this process's own GPU under torchrun; returns other names unchanged."""
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return device


def under_torchrun() -> bool:
    """True if torchrun, or a launcher with the same environment, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_processes(context_parallel: int = 1, sharded: bool = False) -> None:
    """Checks options of `distributed_context` against the environment, alike on all ranks.

    Raises ValueError if the number of processes is not a multiple of `context_parallel`, or if
    torchrun has not started them.
    """
    if not under_torchrun() and (context_parallel > 1 or sharded):
        raise ValueError(
            "sequences and parameters are divided over processes that torchrun has started: "
            "torchrun --nproc-per-node N -m transformer_kernels train ..."
        )
    DistributedContext(0, int(os.environ.get("WORLD_SIZE", "1")), context_parallel)


@contextmanager
def distributed_context(
    context_parallel: int = 1, sharded: bool = False
) -> Iterator[DistributedContext]:
    """Joins the process group that torchrun defines; without torchrun, a single process.

    The arguments are as in `DistributedContext`, the errors as of `check_processes`.
    """
    check_processes(context_parallel, sharded)
    if not under_torchrun():
        yield SINGLE_PROCESS
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device("cuda"))
    distributed.init_process_group()
    yield grid_of_processes(context_parallel, sharded)
    end_process_group()  # after an error torchrun ends all processes


def grid_of_processes(context_parallel: int = 1, sharded: bool = False) -> DistributedContext:
    """The processes of the default group as a grid. A collective; see `distributed_context`."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    grid = DistributedContext(rank, world_size, context_parallel, sharded)
    if context_parallel == 1:
        return grid
    # A group of its own: gradients are summed over the default group at the same time.
    group, _ = distributed.new_subgroups(context_parallel)
    return replace(grid, context_group=group)


def end_process_group() -> None:
    """Destroys the process group once all ranks have called this.

    Deadlock in gloo: its thread needs the GIL to release the tensors of the last collective, and
    destroy_process_group joins that thread while holding the GIL. A delay lets the thread release
    them first.
    """
    distributed.barrier()
    time.sleep(_SHUTDOWN_DELAY)
    distributed.destroy_process_group()
