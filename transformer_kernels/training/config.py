"""Settings of a training run, and dataclasses from plain values of a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..common.argument_checks import shown
from ..nn.options import (
    AttnImplementation,
    check_choice,
    check_positive,
    check_probability,
    check_seed,
)
from .task import Task

Precision = Literal["float32", "bfloat16", "float16"]
"""Autocast dtype of matrix products. Weights, sums and losses stay in float32. float16 uses dynamic
loss scaling."""

Decay = Literal["cosine", "inverse_sqrt"]

Made = TypeVar("Made")


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


def from_fields(cls: Callable[..., Made], values: Any, name: str, **made: Any) -> Made:
    """Makes a dataclass from a dict of its fields; inverse of `dataclasses.asdict`.

    `name` is that of the dict, for errors. The fields `made` are not read from it. Raises
    ValueError for a field that is unknown, absent, of another type or out of range.
    """
    if type(values) is not dict:
        raise ValueError(f"{name} must be a dict, got {shown(values)}")
    hints = get_type_hints(cls)
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    if unknown := values.keys() - set(names):
        raise ValueError(f"{name} has unknown fields: {', '.join(sorted(map(shown, unknown)))}")
    read = dict(made)
    for one in (one for one in names if one not in made):
        if one not in values:
            raise ValueError(f"{name} lacks {one!r}")
        read[one] = _checked(values[one], hints[one], f"{name}.{one}")
    return cls(**read)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """`value`, if it is of the annotated type: a number, a string, a tuple or a dataclass."""
    if get_origin(hint) is UnionType:  # a type, or None
        if value is None:
            return None
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if is_dataclass(hint):
        return from_fields(hint, value, name)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        hints = get_args(hint)
        if type(value) not in (list, tuple) or len(value) != len(hints):
            raise ValueError(f"{name} must have {len(hints)} numbers, got {shown(value)}")
        return tuple(_checked(each, one, name) for each, one in zip(value, hints, strict=True))
    if get_origin(hint) is Literal:
        hint = str  # the class checks its choices
    expected = (int, float) if hint is float else (hint,)
    if type(value) not in expected or (type(value) is int and value.bit_length() > 63):
        raise ValueError(f"{name} must be of type {hint.__name__}, got {shown(value)}")
    if hint is str and not is_text(value):
        raise ValueError(f"{name} must be text, got {shown(value)}")
    return value


def is_text(value: Any) -> bool:
    """True for a string that can be printed and has no null character."""
    try:
        return type(value) is str and b"\0" not in value.encode()
    except UnicodeEncodeError:  # a surrogate
        return False
