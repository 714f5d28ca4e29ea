"""Choices and checks shared by modules and configs: an error names the argument, its value and the
choice."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

AttnImplementation = Literal["eager", "fused", "sdpa"]
"""naive: bmm, softmax, bmm in plain torch. fused: our kernels. torch: torch's own SDPA."""


def check_choice(name: str, value: str, choices: Any) -> None:
    """ValueError unless `value` is one of the strings of the Literal type `choices`."""
    if value not in get_args(choices):
        expected = ", ".join(repr(choice) for choice in get_args(choices))
        raise ValueError(f"{name} must be one of {expected}, got {value!r}")


def check_positive(name: str, value: int) -> None:
    """ValueError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_probability(name: str, value: float) -> None:
    """ValueError unless 0 <= value < 1: a dropout of 1 would train nothing."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")


def check_seed(value: int) -> None:
    """ValueError unless torch's generators can be seeded with `value`."""
    if not 0 <= value < 2**63:
        raise ValueError(f"seed must be at least 0 and below 2**63, got {value}")


def check_device(name: str) -> None:
    """ValueError unless torch can make a tensor on the device of that name."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}") from None
