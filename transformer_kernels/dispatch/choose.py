"""Backend choice: the first backend that supports a problem, and the reasons against the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from transformer_kernels.argument_checks import shown
from transformer_kernels.backends import BACKENDS, Backend
from transformer_kernels.problem import Problem


def names() -> tuple[str, ...]:
    """Returns the valid values of the argument `backend`."""
    return ("auto", *(backend.name for backend in BACKENDS))


def choose(problem: Problem, name: str) -> Backend:
    """Returns the named backend, or for "auto" the first one that supports the problem.

    Raises ValueError with all reasons if the named backend does not support the problem. A named
    backend never falls back to another one.
    """
    candidates = _candidates(name)
    for backend in candidates:
        reasons = backend.unsupported_reasons(problem)
        if not reasons:
            return backend
    if len(candidates) > 1:
        raise ValueError(str(Explanation(problem, None, None, _reasons(problem))))
    raise ValueError(f"backend={name!r} does not support this call: " + "; ".join(reasons))


def _candidates(name: str) -> tuple[Backend, ...]:
    """All backends for "auto", else the named one; raises ValueError for other values."""
    if isinstance(name, str):  # comparing an array would compare its elements
        if name == "auto":
            return BACKENDS
        for backend in BACKENDS:
            if backend.name == name:
                return (backend,)
    raise ValueError(f"backend must be one of {', '.join(map(repr, names()))}, got {shown(name)}")


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`. `str()` of it is a readable report."""

    problem: Problem
    chosen: str | None
    """Name of the backend that would run; None if no backend supports the call."""
    kernel: str | None
    """Description of its kernel."""
    reasons: dict[str, tuple[str, ...]]
    """For each backend the reasons why it does not support the call; empty if it does."""

    def __str__(self) -> str:
        p, kind = self.problem.shape, self.problem.layout.kind
        lines = [
            f"q ({p.B}, {p.H_q}, {p.M}, {p.D})  k ({p.B}, {p.H_kv}, {p.N}, {p.D})  "
            f"v ({p.B}, {p.H_kv}, {p.N}, {p.D_v})  {p.dtype} on {p.device}"
            + ("" if kind == "dense" else f"  ({kind})"),
            f"runs: {self.chosen} ({self.kernel})" if self.chosen else "runs: nothing",
        ]
        for name, reasons in self.reasons.items():
            if name == self.chosen:
                continue
            lines.append(f"{name}: " + ("; ".join(reasons) if reasons else "supported, not chosen"))
        return "\n".join(lines)


def explanation(problem: Problem, name: str, q: Tensor, k: Tensor, v: Tensor) -> Explanation:
    """Explains the choice of `choose`, with the reasons of every backend."""
    reasons = _reasons(problem)
    chosen = next((b for b in _candidates(name) if not reasons[b.name]), None)
    return Explanation(
        problem,
        None if chosen is None else chosen.name,
        None if chosen is None else chosen.kernel(problem, q, k, v),
        reasons,
    )


def _reasons(problem: Problem) -> dict[str, tuple[str, ...]]:
    return {b.name: tuple(b.unsupported_reasons(problem)) for b in BACKENDS}
