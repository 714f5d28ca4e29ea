"""Optional dependencies, which only some features need."""

from __future__ import annotations

from importlib.util import find_spec


def require(module: str, *, extra: str) -> None:
    """Raises ImportError with an install command if `module` is not installed."""
    if find_spec(module) is None:
        raise ImportError(
            f"{module} is not installed: pip install transformer_kernels[{extra}]", name=module
        )
