"""What a training run is decided by."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from transformer_kernels.nn.options import (
    AttnImplementation,
    check_choice,
    check_positive,
    check_seed,
)
from transformer_kernels.training.schedule import Schedule
from transformer_kernels.training.task import Task
from transformer_kernels.training.tasks import task_from_dict

Precision = Literal["float32", "bfloat16", "float16"]
"""Of products, by autocast; weights, sums and losses stay in float32. float16 has its losses scaled
as far as gradients bear it."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run: what for, how long and on how much, and the optimizer (AdamW)."""

    task: Task
    attn_implementation: AttnImplementation = "fused"
    steps: int = 2000
    batch: int = 12
    """Examples a step, of all processes and parts together"""
    accumulate: int = 1
    """Parts that a batch is cut into, one after the other: memory of one, gradients of all."""
    precision: Precision = "float32"
    recompute: bool = False
    """Blocks keep their inputs alone, and compute the rest again in the backward pass."""
    schedule: Schedule = field(default_factory=Schedule)
    weight_decay: float = 0.1
    """On matrices; biases and normalisations are not decayed."""
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    clip: float = 1.0
    """Gradients are scaled down to this norm, all parameters together."""
    eval_every: int = 250
    """Steps from one validation, and checkpoint, to the next; the last step always has both."""
    eval_batches: int = 20
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "eval_every", "eval_batches"):
            check_positive(name, getattr(self, name))
        if self.accumulate > self.batch:
            raise ValueError(
                f"accumulate must be at most batch, got {self.accumulate} and {self.batch}"
            )
        check_choice("attn_implementation", self.attn_implementation, AttnImplementation)
        check_choice("precision", self.precision, Precision)
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, got {self.eps}")
        if not self.clip > 0:
            raise ValueError(f"clip must be above 0, got {self.clip}")
        check_seed(self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return asdict(self) | {"task": self.task.to_dict()}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> TrainConfig:
        """The config that `to_dict` came from; KeyError, TypeError or ValueError where it does not
        fit."""
        return TrainConfig(
            **fields
            | {
                "task": task_from_dict(fields["task"]),
                "schedule": Schedule(**fields["schedule"]),
                "betas": tuple(fields["betas"]),
            }
        )
