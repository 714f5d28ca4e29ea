"""Packages that the core does without."""

from __future__ import annotations

from importlib.util import find_spec


def require(module: str, *, extra: str) -> None:
    """ImportError that says how to get `module`, where it is not installed."""
    if find_spec(module) is None:
        raise ImportError(
            f"{module} is not installed: pip install transformer_kernels[{extra}]", name=module
        )
