"""The validated call of linear attention, its tensors and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..problem import Shape
from .feature_maps import FEATURE_MAPS

CHUNK = 64
"""Tokens per chunk of the reference and of csrc/cpu/linear, as kChunk in its decay.h."""


class LinearState(NamedTuple):
    """State of linear attention: all that later queries need to know about earlier keys.

    Its size does not depend on their number. Float32, or float64 for float64 inputs.
    """

    S: Tensor
    """(B, H_kv, D, D_v): the sum of phi(k) v^T."""
    z: Tensor
    """(B, H_kv, D): the sum of phi(k)."""


class Inputs(NamedTuple):
    """Tensors of a call, in the order of the operators' arguments.

    With cu_seqlens q, k and v have one batch entry, which holds the rows of all sequences.
    """

    q: Tensor
    """(B, H_q, M, D)"""
    k: Tensor
    """(B, H_kv, N, D)"""
    v: Tensor
    """(B, H_kv, N, D_v)"""
    log_decay: Tensor | None = None
    """(B, H_kv, N) in the dtype of the state; any strides."""
    S: Tensor | None = None
    """Initial state, (B, H_kv, D, D_v)."""
    z: Tensor | None = None
    """Initial state, (B, H_kv, D)."""
    cu_seqlens: Tensor | None = None
    """(B + 1), int32, contiguous."""
    key_start: Tensor | None = None
    """(B), int64; None is 0."""
    key_end: Tensor | None = None
    """(B), int64; None makes every key visible."""


DIFFERENTIABLE = 6
"""The first fields of `Inputs`, which have gradients."""


@dataclass(frozen=True)
class Options:
    """Options of a call that are no tensors, in the order of the operators' arguments."""

    feature_map: str
    causal: bool
    normalize: bool
    eps: float

    def pack(self) -> tuple[int, bool, bool, float]:
        index = list(FEATURE_MAPS).index(self.feature_map)
        return index, self.causal, self.normalize, self.eps

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Options:
        """Inverse of `pack`."""
        index, causal, normalize, eps = packed
        return cls(list(FEATURE_MAPS)[index], causal, normalize, eps)


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """One validated call."""

    shape: Shape
    """B counts sequences; M and N count rows of q and k, of all sequences if they are packed."""
    inputs: Inputs
    options: Options

    @property
    def kind(self) -> str:
        return "dense" if self.inputs.cu_seqlens is None else "varlen"


class Results(NamedTuple):
    """Results of a forward pass."""

    o: Tensor
    """(B, H_q, M, D_v) in q's dtype."""
    normalizer: Tensor
    """Denominators (B, H_q, M) in the dtype of the state; without elements if not `normalize`."""
    S: Tensor
    """Final state."""
    z: Tensor
    """Final state."""


class Saved(NamedTuple):
    """Results of a forward pass that are saved for its backward pass."""

    o: Tensor
    normalizer: Tensor


class Gradients(NamedTuple):
    """Results of a backward pass; those of options that are not given are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    S: Tensor | None
    z: Tensor | None

    @classmethod
    def of(cls, outputs: Sequence[Tensor], x: Inputs, *, log_decay_needs_grad: bool) -> Gradients:
        """The outputs of a backward operator; those that are not wanted become None."""
        wanted = (log_decay_needs_grad, x.S is not None, x.z is not None)
        optional = zip(outputs[3:], wanted, strict=True)
        return cls(*outputs[:3], *(g if wants else None for g, wants in optional))
