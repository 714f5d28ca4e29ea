"""Checks that a run can be divided over its processes, before any of its work begins."""

from __future__ import annotations

from ..distributed.rectangles import DROPOUT_COLUMNS
from .config import TrainConfig
from .distributed import DistributedContext
from .tasks import TASKS


def check_scale_out(config: TrainConfig, distributed: DistributedContext) -> None:
    """Checks the settings of a run against the division of its work.

    Raises:
        ValueError: the batch has fewer examples than micro-batches over all processes; the task,
            the length of its sequences or its attention cannot be divided; or the precision is
            float16 and parameters are.
    """
    if config.batch < config.accumulate * distributed.data_ranks:
        raise ValueError(
            f"batch must be at least accumulate times the number of processes"
            f"{'' if distributed.context_parallel == 1 else ' that do not share sequences'}, "
            f"{config.accumulate} x {distributed.data_ranks}, got {config.batch}"
        )
    if not distributed.forward_is_collective:
        return
    if not config.task.scales_out:
        able = ", ".join(kind for kind, task in TASKS.items() if task.scales_out)
        raise ValueError(
            f"the work of one example can be divided over processes for the tasks {able}, got the "
            f"task {config.task.kind}"
        )
    if distributed.sharded and config.precision == "float16":
        raise ValueError(
            "precision must be float32 or bfloat16 where parameters are divided over processes, "
            "got float16: use bfloat16"  # each rank would scale its losses on its own
        )
    if distributed.context_parallel > 1:
        _check_sequences(config, distributed.context_parallel)


def _check_sequences(config: TrainConfig, ranks: int) -> None:
    """Checks length and attention for sequences in the layout "zigzag"; see docs/scale.md."""
    model = config.task.model
    dropout = model.dropout > 0.0
    chunk = DROPOUT_COLUMNS if dropout else 1
    if model.context % (2 * ranks * chunk):
        raise ValueError(
            f"context must be a multiple of {2 * ranks * chunk} to be divided over {ranks} "
            f"processes{' with dropout' if dropout else ''}, got {model.context}"
        )
    if config.attn_implementation == "sdpa":
        raise ValueError(
            "attn_implementation must be 'fused' or 'eager' where sequences are divided over "
            "processes, got 'sdpa'"
        )
