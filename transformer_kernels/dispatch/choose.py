"""Backend choice: the first backend that supports a problem, and the reasons against the others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..backends import CudaBackend, ReferenceBackend, TritonBackend
from ..common.argument_checks import shown
from ..common.torch_private import constant_in_compiled_code
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
    candidates = _candidates(problem, name, backends)
    for backend in candidates:
        reasons = backend.unsupported_reasons(problem)
        if not reasons:
            return backend
    if len(candidates) > 1:
        raise ValueError(str(Explanation(problem, None, None, _reasons(problem, backends), "")))
    raise ValueError(f"backend={name!r} does not support this call: " + "; ".join(reasons))


def _candidates(problem: AnyProblem, name: str, backends: Sequence[Chosen]) -> Sequence[Chosen]:
    """All backends in order for "auto", else the named one; raises ValueError for other values."""
    if isinstance(name, str):  # comparing an array would compare its elements
        if name == "auto":
            return _in_order(problem, backends)
        for backend in backends:
            if backend.name == name:
                return (backend,)
    listed = ", ".join(map(repr, names(backends)))
    raise ValueError(f"backend must be one of {listed}, got {shown(name)}")


def _in_order(problem: AnyProblem, backends: Sequence[Chosen]) -> Sequence[Chosen]:
    """Backends in the order in which "auto" tries them: decoding is limited by memory, and linear
    attention has an order of its own."""
    shape = problem.shape
    if problem.kind == "cache" or not prefers_triton(shape.device, shape.dtype):
        return backends
    return sorted(backends, key=lambda backend: not isinstance(backend, TritonBackend))


@constant_in_compiled_code
@functools.cache
def prefers_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """True in half precision on GPUs of compute capability 10.x: only Triton's kernels use their
    matrix units (tcgen05), and those of csrc/cuda the instructions of Ampere (mma.sync)."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device)[0] == 10


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
            lines.append(f"{name}: " + ("; ".join(reasons) or self._not_chosen(name)))
        return "\n".join(lines)

    def _not_chosen(self, name: str) -> str:
        p, pair = self.problem.shape, (self.chosen, name)
        if pair == (TritonBackend.name, CudaBackend.name) and prefers_triton(p.device, p.dtype):
            return "supported, not chosen: only triton uses this GPU's matrix units (tcgen05)"
        return "supported, not chosen"


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
    candidates, reasons = _candidates(problem, name, backends), _reasons(problem, backends)
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
