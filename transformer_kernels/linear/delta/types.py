"""Tensors, options and results of the gated delta rule. Annotations are rows of its table of
fields, as in `linear.types`."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

NORM_EPS = 1e-6
"""Added to the sum of squares of q and k under `l2norm`; as kNormEps in csrc/cpu/delta/chunk.h."""


class Inputs(NamedTuple):
    """Tensors of a call. `entries` is B; with cu_seqlens it is 1, and the entry holds the rows of
    all sequences. H_v is a multiple of H_k: consecutive value heads share a head of q and k."""

    q: Annotated[Tensor, "(entries, H_k, T, D)", "passes steps"]
    k: Annotated[Tensor, "(entries, H_k, T, D)", "passes steps"]
    v: Annotated[Tensor, "(entries, H_v, T, D_v)", "passes steps"]
    log_decay: Annotated[Tensor, "(entries, H_v, T, gates)", "passes steps"]
    """In the dtype of the state, at most 0; any strides. `gates` is 1, or D for a gate for each key
    channel."""
    beta: Annotated[Tensor, "(entries, H_v, T)", "passes steps"]
    """In the dtype of the state; any strides."""
    S: Annotated[Tensor | None, "(B, H_v, D, D_v)", "passes steps"] = None
    """Initial state, contiguous; None is zero. Steps overwrite it."""
    cu_seqlens: Annotated[Tensor | None, "(B + 1)", "passes"] = None
    """int32, contiguous."""


class Options(NamedTuple):
    """Options of a call that are no tensors."""

    scale: Annotated[float, "", "passes steps"]
    l2norm: Annotated[bool, "", "passes steps"] = False
    """q and k are divided by their lengths, sqrt(sum of squares + NORM_EPS)."""


class Results(NamedTuple):
    """Results of a forward pass."""

    o: Tensor
    """(entries, H_v, T, D_v) in v's dtype and layout; zero after the last packed sequence."""
    S: Tensor
    """Final state (B, H_v, D, D_v), float32, or float64 for float64 inputs."""


class Cotangents(NamedTuple):
    """Gradients of the results; None is zero."""

    d_o: Annotated[Tensor, "(entries, H_v, T, D_v)", "backward"]
    dS_end: Annotated[Tensor | None, "(B, H_v, D, D_v)", "backward"]  # noqa: N815


class Gradients(NamedTuple):
    """Results of a backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    """(entries, H_v, T, gates), contiguous."""
    beta: Tensor
    """(entries, H_v, T), contiguous."""
    S: Tensor | None
    """None without an initial state."""
