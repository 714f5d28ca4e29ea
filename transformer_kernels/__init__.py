"""Fused, exact, masked attention kernels for PyTorch, forward and backward, on CPUs and GPUs.

Examples:
    >>> import torch, transformer_kernels as tk
    >>> q, k, v = (torch.randn(1, 8, 1024, 64, requires_grad=True) for _ in range(3))
    >>> o = tk.attention(q, k, v, mask=tk.Mask.causal())
    >>> o.sum().backward()

docs/attention.md specifies the operator: formulas, masks, dropout and numerics.
"""

from .dispatch.choose import Explanation
from .functional.attention import attention
from .functional.causal_conv1d import causal_conv1d, causal_conv1d_step
from .functional.decode import attention_decode
from .functional.delta_rule import (
    gated_delta_rule,
    gated_delta_rule_step,
    gated_delta_rule_varlen,
)
from .functional.explain import explain
from .functional.kv_cache import QuantizedCache, append_to_cache, quantize_cache
from .functional.linear_attention import linear_attention
from .functional.linear_decode import linear_attention_decode
from .functional.linear_varlen import linear_attention_varlen
from .functional.varlen import attention_varlen
from .functional.weights import attention_weights
from .info import info
from .integrations.torch_operators import forward_operators
from .integrations.torch_sdpa import scaled_dot_product_attention
from .integrations.torch_switch import disable, enable, enabled
from .linear.types import LinearState
from .masks.mask import Mask
from .scores.alibi import Alibi, alibi, alibi_slopes
from .scores.relative import RelativeBias, RelativeKeys, relative_bias, relative_keys
from .version import __version__

__all__ = [
    "Alibi",
    "Explanation",
    "LinearState",
    "Mask",
    "QuantizedCache",
    "RelativeBias",
    "RelativeKeys",
    "__version__",
    "alibi",
    "alibi_slopes",
    "append_to_cache",
    "attention",
    "attention_decode",
    "attention_varlen",
    "attention_weights",
    "causal_conv1d",
    "causal_conv1d_step",
    "disable",
    "enable",
    "enabled",
    "explain",
    "forward_operators",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_delta_rule_varlen",
    "info",
    "linear_attention",
    "linear_attention_decode",
    "linear_attention_varlen",
    "quantize_cache",
    "relative_bias",
    "relative_keys",
    "scaled_dot_product_attention",
]
