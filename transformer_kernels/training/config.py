"""What a training run of the text generator is decided by, and settings worth having a name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from transformer_kernels.models.generator import SIZES, GeneratorConfig
from transformer_kernels.nn.options import AttentionPath, check_choice, check_positive, check_seed
from transformer_kernels.training.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run: the model, how long and on how much, and the optimizer (AdamW)."""

    model: GeneratorConfig
    attention: AttentionPath = "fused"
    steps: int = 2000
    batch: int = 12
    schedule: Schedule = field(default_factory=Schedule)
    weight_decay: float = 0.1
    """On matrices; biases and normalisations are not decayed."""
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    """Gradients are scaled down to this norm, all parameters together."""
    eval_every: int = 250
    """Steps from one validation, and checkpoint, to the next; the last step always has both."""
    eval_batches: int = 20
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "eval_every", "eval_batches"):
            check_positive(name, getattr(self, name))
        check_choice("attention", self.attention, AttentionPath)
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if not self.clip > 0:
            raise ValueError(f"clip must be above 0, got {self.clip}")
        check_seed(self.seed)

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one step predicts."""
        return self.batch * self.model.context

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> TrainConfig:
        """The config that `to_dict` came from; TypeError or ValueError where it does not fit."""
        return TrainConfig(
            **fields
            | {
                "model": GeneratorConfig(**fields["model"]),
                "schedule": Schedule(**fields["schedule"]),
                "betas": tuple(fields["betas"]),
            }
        )


PRESETS = {
    "demo": TrainConfig(
        model=SIZES["demo"],
        steps=300,
        batch=4,
        schedule=Schedule(peak=2e-3, warmup=30),
        eval_every=50,
        eval_batches=8,
    ),
    "nanogpt-cpu": TrainConfig(
        model=SIZES["nanogpt-cpu"], schedule=Schedule(peak=1e-3, warmup=100)
    ),
    "seed": TrainConfig(
        model=SIZES["seed"],
        steps=170_000,
        batch=32,
        schedule=Schedule(peak=1e-4, warmup=5000),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        eval_every=1000,
    ),
}
"""By name, as `SIZES`. nanogpt-cpu is nanoGPT's setting for a laptop (config/train_shakespeare_char
with its CPU overrides); seed has the batches and steps of the model's source."""
