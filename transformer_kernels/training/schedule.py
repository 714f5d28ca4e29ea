"""Learning rate schedules: pure functions of the step, so that resuming needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..nn.options import check_choice

Decay = Literal["cosine", "inverse_sqrt"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak` in `warmup` steps, then a decay to `final_share * peak`.

    "cosine" decays along half a cosine and reaches the minimum at the last step. "inverse_sqrt"
    decays as 1/sqrt(step), with `final_share * peak` as its lower bound. With
    peak = (width * warmup)^-0.5 and final_share = 0 it is the schedule of Attention Is All You
    Need, section 5.3.
    """

    decay: Decay = "cosine"
    """Decay after the warm-up: half a cosine to the last step, or 1/sqrt(step)"""
    peak: float = 1e-3
    """Maximum learning rate"""
    warmup: int = 100
    """Warm-up steps"""
    final_share: float = 0.1
    """Minimum learning rate after the warm-up, as a share of `peak`"""

    def __post_init__(self) -> None:
        check_choice("decay", self.decay, Decay)
        if not 0 < self.peak < math.inf:
            raise ValueError(f"peak must be above 0 and finite, got {self.peak}")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"final_share must be between 0 and 1, got {self.final_share}")
        if self.warmup < 0 or (self.decay == "inverse_sqrt" and self.warmup == 0):
            least = 1 if self.decay == "inverse_sqrt" else 0
            raise ValueError(f"warmup must be at least {least}, got {self.warmup}")

    def learning_rate(self, step: int, steps: int) -> float:
        """Learning rate of step `step`, counted from 0, of `steps`. Step 0 has a non-zero rate.

        Raises:
            ValueError: unless 0 <= step < steps.
        """
        if not 0 <= step < steps:
            raise ValueError(f"step must be between 0 and {steps - 1}, got {step}")
        count = step + 1
        if count <= self.warmup:
            return self.peak * count / self.warmup
        if self.decay == "inverse_sqrt":
            return self.peak * max(self.final_share, math.sqrt(self.warmup / count))
        progress = (count - self.warmup) / (steps - self.warmup)
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.final_share + (1.0 - self.final_share) * share)
