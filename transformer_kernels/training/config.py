"""Settings of a training run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..nn.options import (
    AttnImplementation,
    check_choice,
    check_positive,
    check_probability,
    check_seed,
)
from .schedule import Schedule
from .task import Task

Precision = Literal["float32", "bfloat16", "float16"]
"""Autocast dtype of matrix products. Weights, sums and losses stay in float32. float16 uses dynamic
loss scaling."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one run: task, length, batch size and optimizer (AdamW)."""

    task: Task
    attn_implementation: AttnImplementation = "fused"
    """eager (bmm, softmax, bmm in plain torch), fused (the kernels of this package) or sdpa
    (torch's scaled_dot_product_attention)"""
    steps: int = 2000
    """Training steps, one batch each"""
    batch: int = 12
    """Examples per step, over all processes and micro-batches"""
    accumulate: int = 1
    """Micro-batches per step (gradient accumulation): less memory, the same gradient"""
    precision: Precision = "float32"
    """Autocast dtype of matrix products; weights stay in float32"""
    recompute: bool = False
    """Activation checkpointing: blocks keep only their inputs for the backward pass"""
    schedule: Schedule = field(default_factory=Schedule)
    weight_decay: float = 0.1
    """Applied to matrices only, not to biases and normalisation weights"""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of the moments of AdamW"""
    eps: float = 1e-8
    """Epsilon of AdamW"""
    clip: float = 1.0
    """Maximum norm of the gradient of all parameters together"""
    eval_every: int = 250
    """Steps between validations, each followed by a checkpoint; the last step has both"""
    eval_batches: int = 20
    """Batches of held-out data in a validation"""
    seed: int = 0
    """Seed of weights, batches and dropout"""
    device: str = "cpu"
    """torch device; with "cuda", each process under torchrun uses its own GPU"""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "eval_every", "eval_batches"):
            check_positive(name, getattr(self, name))
        if self.accumulate > self.batch:
            raise ValueError(
                f"accumulate must be at most batch, got {self.accumulate} and {self.batch}"
            )
        check_choice("attn_implementation", self.attn_implementation, AttnImplementation)
        check_choice("precision", self.precision, Precision)
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {self.weight_decay}")
        for beta in self.betas:
            check_probability("betas", beta)
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps must be above 0 and finite, got {self.eps}")
        if not self.clip > 0:
            raise ValueError(f"clip must be above 0, got {self.clip}")
        check_seed(self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return asdict(self) | {"task": self.task.to_dict()}
