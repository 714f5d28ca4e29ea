"""Backend choice: the first backend that supports a problem, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..backends import ReferenceBackend
from ..common.argument_checks import shown
from ..problem import Shape
from .autograd import needs_reference


class AnyProblem(Protocol):
    """A validated call of attention or of linear attention."""

    @property
    def shape(self) -> Shape: ...

    @property
    def kind(self) -> str:
        """Its layout, such as "dense" or "varlen"."""

    @property
    def described(self) -> str:
        """The shapes of its tensors."""


class Candidate(Protocol):
    """A backend for one kind of call."""

    @property
    def name(self) -> str: ...

    def unsupported_reasons(self, problem: Any) -> list[str]: ...

    def kernel(self, problem: Any, q: Tensor, k: Tensor, v: Tensor) -> str: ...


_ONLY_REFERENCE = "derivatives in forward mode or of higher order: they use the reference"

Chosen = TypeVar("Chosen", bound=Candidate)


def names(backends: Sequence[Candidate]) -> tuple[str, ...]:
    """Returns the valid values of the argument `backend`."""
    return ("auto", *(backend.name for backend in backends))


def choose(problem: AnyProblem, name: str, backends: Sequence[Chosen]) -> Chosen:
    """Returns the named backend, or for "auto" the first one that supports the problem.

    Raises ValueError with all reasons if the named backend does not support the problem. A named
    backend never falls back to another one.
    """
    candidates = _candidates(name, backends)
    for backend in candidates:
        reasons = backend.unsupported_reasons(problem)
        if not reasons:
            return backend
    if len(candidates) > 1:
        raise ValueError(str(Explanation(problem, None, None, _reasons(problem, backends), "")))
    raise ValueError(f"backend={name!r} does not support this call: " + "; ".join(reasons))


def _candidates(name: str, backends: Sequence[Chosen]) -> Sequence[Chosen]:
    """All backends for "auto", else the named one; raises ValueError for other values."""
    if isinstance(name, str):  # comparing an array would compare its elements
        if name == "auto":
            return backends
        for backend in backends:
            if backend.name == name:
                return (backend,)
    listed = ", ".join(map(repr, names(backends)))
    raise ValueError(f"backend must be one of {listed}, got {shown(name)}")


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`. `str()` of it is a readable report."""

    problem: Any
    """The validated call: its sizes and options."""
    chosen: str | None
    """Name of the backend that would run; None if no backend supports the call."""
    kernel: str | None
    """Description of its kernel."""
    reasons: dict[str, tuple[str, ...]]
    """For each backend the reasons why it does not support the call; empty if it does."""
    general_path: str
    """The reason why the call takes the general path, whose checks cost some microseconds; "" if it
    takes the fast path (`dispatch.fast_path`)."""

    def __str__(self) -> str:
        p, kind = self.problem.shape, self.problem.kind
        lines = [
            f"{self.problem.described}  {p.dtype} on {p.device}"
            + ("" if kind == "dense" else f"  ({kind})"),
            f"runs: {self.chosen} ({self.kernel})" if self.chosen else "runs: nothing",
        ]
        if self.chosen:
            lines.append(
                f"path: general ({self.general_path})" if self.general_path else "path: fast"
            )
        for name, reasons in self.reasons.items():
            if name == self.chosen:
                continue
            lines.append(f"{name}: " + ("; ".join(reasons) if reasons else "supported, not chosen"))
        return "\n".join(lines)


def explanation(
    problem: AnyProblem,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backends: Sequence[Candidate],
    general_path: str,
) -> Explanation:
    """Explains the choice of `choose`, with the reasons of every backend.

    Inside a transform whose derivatives the kernels lack, the reference runs whatever the name is.
    """
    candidates, reasons = _candidates(name, backends), _reasons(problem, backends)
    if needs_reference((q, k, v)):
        candidates = backends
        reasons = {
            x: why if x == ReferenceBackend.name else (*why, _ONLY_REFERENCE)
            for x, why in reasons.items()
        }
    chosen = next((b for b in candidates if not reasons[b.name]), None)
    return Explanation(
        problem,
        None if chosen is None else chosen.name,
        None if chosen is None else chosen.kernel(problem, q, k, v),
        reasons,
        general_path,
    )


def _reasons(problem: AnyProblem, backends: Sequence[Candidate]) -> dict[str, tuple[str, ...]]:
    return {b.name: tuple(b.unsupported_reasons(problem)) for b in backends}
