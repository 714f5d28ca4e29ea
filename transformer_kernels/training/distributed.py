"""The processes that train together: one, or as many as torchrun has started."""

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

_LETTING_GO = 0.2
"""Seconds"""


@dataclass(frozen=True)
class DistributedContext:
    """This process's place among `count`."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that validates, writes and speaks."""
        return self.rank == 0

    def share(self, batch: Batch) -> Batch:
        """This process's examples of a batch that all of them drew alike."""
        return {name: x[self.rank :: self.count] for name, x in batch.items()}

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model with gradients that are means over all processes."""
        if self.count == 1:
            return model
        devices = None if device.type == "cpu" else [device]
        return DistributedDataParallel(model, device_ids=devices)

    def gather(self, value: Any) -> list[Any]:
        """What every process has given, in their order."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def sum(self, value: Tensor) -> float:
        """Over all processes, of a number on the device."""
        if self.count > 1:
            distributed.all_reduce(value)
        return value.item()

    def any(self, value: bool) -> bool:
        """Whether a process says so."""
        return any(self.gather(value))


SINGLE_PROCESS = DistributedContext()


def local_device(device: str) -> str:
    """Of several GPUs the one for this process of those that torchrun has started here."""
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return device


@contextmanager
def joined() -> Iterator[DistributedContext]:
    """While it is open this process is one of those that torchrun has started; alone without it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield SINGLE_PROCESS
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device("cuda"))
    distributed.init_process_group()
    yield DistributedContext(distributed.get_rank(), distributed.get_world_size())
    # gloo's thread needs Python's lock to let go of the tensors of the last exchange, and its end
    # waits for that thread with the lock held: nothing may be left to let go of. After an error
    # torchrun ends all processes.
    distributed.barrier()
    time.sleep(_LETTING_GO)
    distributed.destroy_process_group()
