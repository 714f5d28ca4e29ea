"""Access to the compiled extension `transformer_kernels._C`. No other module imports it."""

from __future__ import annotations

try:
    from ... import _C as compiled  # noqa: N811
except ImportError as error:
    _UNAVAILABLE: str | None = (
        f"the compiled extension transformer_kernels._C is not available ({error})"
    )
else:
    _UNAVAILABLE = None

__all__ = ["compiled", "release_workspace", "unavailable_reason", "want_poison"]
"""`compiled` is the extension; it is defined only if `unavailable_reason()` is None."""


def unavailable_reason() -> str | None:
    """Returns the reason why the extension failed to load; None if it is loaded."""
    return _UNAVAILABLE


def want_poison(wanted: bool) -> None:
    """Enables or disables filling outputs and workspace with NaN before use; for tests."""
    if _UNAVAILABLE is None:
        compiled.want_poison(wanted)


def release_workspace() -> None:
    """Frees the workspace that the CPU kernels keep between calls (csrc/common/workspace.h)."""
    if _UNAVAILABLE is None:
        compiled.release_workspace()
