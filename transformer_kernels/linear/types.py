"""Tensors, options, results and state of linear attention. Annotations are rows of its table of
fields, see `linear.family`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: torch.nn.functional.elu(x) + 1.0,
    "relu": torch.relu,
    "identity": lambda x: x,
}
"""Those that the kernels compute, in the order of tk::FeatureMap in csrc/common/linear_params.h."""

FeatureMap = str | Callable[[Tensor], Tensor]
"""A callable is applied before the kernels, with "identity"."""

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
    """Tensors of a call. `entries` is B; with cu_seqlens it is 1, and the entry holds the rows of
    all sequences."""

    q: Annotated[Tensor, "(entries, H_q, M, D)", "passes steps"]
    k: Annotated[Tensor, "(entries, H_kv, N, D)", "passes steps"]
    v: Annotated[Tensor, "(entries, H_kv, N, D_v)", "passes steps"]
    log_decay: Annotated[Tensor | None, "(entries, H_kv, N)", "passes steps"] = None
    """In the dtype of the state; any strides."""
    S: Annotated[Tensor | None, "(B, H_kv, D, D_v)", "passes steps"] = None
    """Initial state; steps overwrite it."""
    z: Annotated[Tensor | None, "(B, H_kv, D)", "passes steps"] = None
    cu_seqlens: Annotated[Tensor | None, "(B + 1)", "passes"] = None
    """int32, contiguous."""
    key_start: Annotated[Tensor | None, "(B)", "passes"] = None
    """int64; None is 0."""
    key_end: Annotated[Tensor | None, "(B)", "passes"] = None
    """int64; None makes every key visible."""


_NUMBERS = {name: number for number, name in enumerate(FEATURE_MAPS)}


class Options(NamedTuple):
    """Options of a call that are no tensors."""

    feature_map: Annotated[str, "", "passes steps"]
    normalize: Annotated[bool, "", "passes steps"] = True
    eps: Annotated[float, "", "passes steps"] = 1e-6
    causal: Annotated[bool, "", "passes"] = True

    def pack(self) -> tuple[Any, ...]:
        """Returns the arguments of an operator: the number of the feature map for its name."""
        return _NUMBERS[self.feature_map], *self[1:]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Options:
        """Inverse of `pack`."""
        index, *rest = packed
        return cls(list(FEATURE_MAPS)[index], *rest)


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


class Cotangents(NamedTuple):
    """Gradients of the results of a forward pass; None is zero."""

    d_o: Annotated[Tensor, "(entries, H_q, M, D_v)", "backward"]
    dS_end: Annotated[Tensor | None, "(B, H_kv, D, D_v)", "backward"]  # noqa: N815
    dz_end: Annotated[Tensor | None, "(B, H_kv, D)", "backward"]


class Saved(NamedTuple):
    """Results of a forward pass that are saved for its backward pass."""

    o: Annotated[Tensor, "(entries, H_q, M, D_v)", "backward"]
    normalizer: Annotated[Tensor, "(entries, H_q, M)", "backward"]


class Gradients(NamedTuple):
    """Results of a backward pass; those of options that are not given are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    S: Tensor | None
    z: Tensor | None
