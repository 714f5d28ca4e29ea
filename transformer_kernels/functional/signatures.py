"""Options of the operators, once for all their overloads; the implementations have the defaults."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from ..linear.types import FeatureMap, LinearState
from ..masks.mask import Mask
from ..scores.alibi import Alibi
from ..scores.options import SharedScoreArguments


class _Options(SharedScoreArguments, total=False):
    mask: Mask | None
    scale: float | Tensor | None
    sinks: Tensor | None
    backend: str


class AttentionOptions(_Options, total=False):
    """Options of `attention`."""

    bias: Tensor | Alibi | None
    dropout_p: float
    seed: int | Tensor | None


class _AlibiOptions(_Options, total=False):
    bias: Alibi | None


class DecodeOptions(_AlibiOptions, total=False):
    """Options of `attention_decode`."""

    k_scale: Tensor | None
    v_scale: Tensor | None


class VarlenOptions(_AlibiOptions, total=False):
    """Options of `attention_varlen`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    block_table: Tensor | None
    dropout_p: float
    seed: int | Tensor | None


class DeltaOptions(TypedDict, total=False):
    """Options of `gated_delta_rule` and `gated_delta_rule_varlen`."""

    scale: float | None
    l2norm: bool
    initial_state: Tensor | None
    backend: str


class LinearVarlenOptions(TypedDict, total=False):
    """Options of `linear_attention_varlen`."""

    feature_map: FeatureMap
    causal: bool
    eps: float
    normalize: bool
    log_decay: Tensor | None
    initial_state: LinearState | None
    backend: str


class LinearOptions(LinearVarlenOptions, total=False):
    """Options of `linear_attention`."""

    mask: Mask | None


class ConvOptions(TypedDict, total=False):
    """Options of `causal_conv1d`."""

    activation: str | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    backend: str
