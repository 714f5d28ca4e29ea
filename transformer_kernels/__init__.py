"""Fused, exact, masked attention kernels for PyTorch, forward and backward, on CPUs and GPUs.

>>> import torch, transformer_kernels as tk
>>> q, k, v = (torch.randn(1, 8, 1024, 64, requires_grad=True) for _ in range(3))
>>> o = tk.attention(q, k, v, mask=tk.Mask.causal())
>>> o.sum().backward()

docs/attention.md specifies the operator: formulas, masks, dropout and numerics.
"""

from transformer_kernels.dispatch.choose import Explanation
from transformer_kernels.functional.attention import attention
from transformer_kernels.functional.decode import attention_decode
from transformer_kernels.functional.explain import explain
from transformer_kernels.functional.kv_cache import append_to_cache
from transformer_kernels.functional.linear_attention import linear_attention
from transformer_kernels.functional.linear_decode import linear_attention_decode
from transformer_kernels.functional.linear_varlen import linear_attention_varlen
from transformer_kernels.functional.varlen import attention_varlen
from transformer_kernels.functional.weights import attention_weights
from transformer_kernels.info import info
from transformer_kernels.integrations.torch_operators import forward_operators
from transformer_kernels.integrations.torch_sdpa import scaled_dot_product_attention
from transformer_kernels.integrations.torch_switch import disable, enable, enabled
from transformer_kernels.linear.types import LinearState
from transformer_kernels.masks.mask import Mask
from transformer_kernels.scores.alibi import Alibi, alibi, alibi_slopes
from transformer_kernels.scores.relative import (
    RelativeBias,
    RelativeKeys,
    relative_bias,
    relative_keys,
)
from transformer_kernels.version import __version__

__all__ = [
    "Alibi",
    "Explanation",
    "LinearState",
    "Mask",
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
    "disable",
    "enable",
    "enabled",
    "explain",
    "forward_operators",
    "info",
    "linear_attention",
    "linear_attention_decode",
    "linear_attention_varlen",
    "relative_bias",
    "relative_keys",
    "scaled_dot_product_attention",
]
