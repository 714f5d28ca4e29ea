"""Argument checks shared by modules and configs.

Errors name the argument, its value and the expected values.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

AttnImplementation = Literal["eager", "fused", "sdpa"]
"""eager: bmm, softmax, bmm in plain torch. fused: these kernels. sdpa: torch's own SDPA."""


def check_fields(config: object, *, may_be_zero: tuple[str, ...] = ()) -> None:
    """Checks the fields of a model's config, a dataclass, by their types and names.

    Every int is at least 1, or 0 if named in `may_be_zero`. Every field of a Literal type is one of
    its strings. Fields whose names end in "dropout" are probabilities, and `eps` is above 0. None
    is valid where the type includes it.

    Raises:
        ValueError: a field is out of range; the message names it.
    """
    for name, hint in get_type_hints(type(config)).items():
        value, kinds = getattr(config, name), get_args(hint) or (hint,)
        if value is None and NoneType in kinds:
            continue
        if get_origin(hint) is Literal:
            check_choice(name, value, hint)
        elif name in may_be_zero:
            check_not_negative(name, value)
        elif int in kinds:
            check_positive(name, value)
        elif name.endswith("dropout"):
            check_probability(name, value)
        elif name == "eps" and not value > 0:
            raise ValueError(f"eps must be above 0, got {value}")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises ValueError unless `value` is one of the strings of the Literal type `choices`."""
    if value not in get_args(choices):
        expected = ", ".join(repr(choice) for choice in get_args(choices))
        raise ValueError(f"{name} must be one of {expected}, got {value!r}")


def check_positive(name: str, value: int) -> None:
    """Raises ValueError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_not_negative(name: str, value: int) -> None:
    """Raises ValueError unless `value` is an int of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")


def check_probability(name: str, value: float) -> None:
    """Raises ValueError unless 0 <= value < 1; a dropout of 1 would zero every gradient."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")


def check_seed(value: int) -> None:
    """Raises ValueError unless 0 <= value < 2**63, the range of torch's generators."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"seed must be at least 0 and below 2**63, got {value!r}")


def check_device(name: str) -> None:
    """Raises ValueError unless the named device holds tensors whose values can be read."""
    try:
        torch.zeros((), device=name).item()  # "meta" has no values
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}") from None
