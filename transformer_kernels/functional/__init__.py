"""Public operators, each with its signature once: dense, packed and cached calls, `explain`."""

from .attention import attention
from .causal_conv1d import causal_conv1d, causal_conv1d_step
from .decode import attention_decode
from .delta_rule import gated_delta_rule, gated_delta_rule_step, gated_delta_rule_varlen
from .explain import explain
from .kv_cache import QuantizedCache, append_to_cache, quantize_cache
from .linear_attention import linear_attention
from .linear_decode import linear_attention_decode
from .linear_varlen import linear_attention_varlen
from .varlen import attention_varlen

__all__ = [
    "QuantizedCache",
    "append_to_cache",
    "attention",
    "attention_decode",
    "attention_varlen",
    "causal_conv1d",
    "causal_conv1d_step",
    "explain",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_delta_rule_varlen",
    "linear_attention",
    "linear_attention_decode",
    "linear_attention_varlen",
    "quantize_cache",
]
