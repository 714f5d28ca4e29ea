"""Data-parallel training: a single process, or the processes started by torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from transformer_kernels.training.data import Batch

_SHUTDOWN_DELAY = 0.2
"""Seconds between the last collective and the shutdown of the process group"""


@dataclass(frozen=True)
class DistributedContext:
    """Rank of this process among `world_size` processes, and their collectives."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """True for rank 0, which validates, writes files and prints."""
        return self.rank == 0

    def shard(self, batch: Batch) -> Batch:
        """This rank's examples of a batch that is the same on all ranks."""
        return {name: x[self.rank :: self.world_size] for name, x in batch.items()}

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Wraps the model so that gradients are averaged over all ranks."""
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

    def any(self, value: bool) -> bool:
        """True if `value` is true on any rank."""
        return any(self.all_gather(value))


SINGLE_PROCESS = DistributedContext()


def local_device(device: str) -> str:
    """Replaces "cuda" by this process's own GPU under torchrun; returns other names unchanged."""
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return device


@contextmanager
def distributed_context() -> Iterator[DistributedContext]:
    """Joins the process group that torchrun defines; without torchrun, a single process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield SINGLE_PROCESS
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device("cuda"))
    distributed.init_process_group()
    yield DistributedContext(distributed.get_rank(), distributed.get_world_size())
    end_process_group()  # after an error torchrun ends all processes


def end_process_group() -> None:
    """Destroys the process group once all ranks have called this.

    Deadlock in gloo: its thread needs the GIL to release the tensors of the last collective, and
    destroy_process_group joins that thread while holding the GIL. A delay lets the thread release
    them first.
    """
    distributed.barrier()
    time.sleep(_SHUTDOWN_DELAY)
    distributed.destroy_process_group()
