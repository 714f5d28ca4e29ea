"""Memory that a run needs at least, compared with that of the machine before any is allocated."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from .data import Dataset
from .task import Task

_TRAINING_COPIES = 4
"""Weights, their gradients and AdamW's two moments."""

_BUFFER_COPIES = 8
"""A table of sinusoids is computed in float64, with a few temporaries."""


def machine_bytes() -> float:
    """Physical memory, or the memory limit of the container if that is lower."""
    if not hasattr(os, "sysconf"):  # Windows
        return float("inf")
    total: float = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total


def check_model_fits(task: Task, *, training: bool, shards: int = 1) -> None:
    """Raises ValueError if the model of a task needs more memory than the machine has.

    `training` adds gradients and the optimizer's state, on the CPU. If parameters are divided over
    `shards` processes, each of them has the whole model once, before it is divided.
    """
    try:
        needed = _model_bytes(task, max(1.0, _TRAINING_COPIES / shards) if training else 1)
    except (RuntimeError, TypeError, OverflowError):  # a tensor of more than 2**63 bytes
        needed = float("inf")
    if needed >= machine_bytes():
        raise ValueError(
            f"the model needs {_gib(needed)} GiB of memory and this machine has "
            f"{_gib(machine_bytes())}: {task.model}"
        )


def check_batch_fits(batch: int, data: Dataset) -> None:
    """Raises ValueError if the examples of a batch need more memory than the machine has."""
    example = sum(x.numel() * x.element_size() for x in data.held_out(1).values())
    if batch * example > machine_bytes():
        raise ValueError(
            f"batch must be at most {machine_bytes() // example:.0f}, the examples that fit in "
            f"this machine's {_gib(machine_bytes())} GiB of memory, got {batch}"
        )


def _model_bytes(task: Task, copies: float) -> float:
    """Bytes of a model that is not built: they grow linearly with the number of layers."""
    layers: int | None = getattr(task.model, "layers", None)
    if layers is None:
        return _bytes(task, copies)
    one, two = (_bytes(replace(task, model=replace(task.model, layers=n)), copies) for n in (1, 2))
    return one + (layers - 1) * (two - one)


def _bytes(task: Task, copies: float) -> float:
    with torch.device("meta"):
        model = task.build("eager")
    weights = sum(x.numel() * x.element_size() for x in model.parameters())
    buffers = sum(x.numel() * x.element_size() for x in model.buffers())
    return copies * weights + _BUFFER_COPIES * buffers


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"
