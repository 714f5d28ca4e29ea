"""Fused attention kernels for PyTorch: exact, masked, trainable, on the hardware you have.

>>> import torch, transformer_kernels as tk
>>> q, k, v = (torch.randn(1, 8, 1024, 64, requires_grad=True) for _ in range(3))
>>> o = tk.attention(q, k, v, mask=tk.Mask.causal())
>>> o.sum().backward()

The operator and its contract are described in docs/attention.md.
"""

from transformer_kernels.api import attention
from transformer_kernels.bias import Alibi, alibi, alibi_slopes
from transformer_kernels.cache import append_to_cache
from transformer_kernels.decode import attention_decode
from transformer_kernels.dispatch import Explanation
from transformer_kernels.drop_in import disable, enable, enabled, scaled_dot_product_attention
from transformer_kernels.explain import explain
from transformer_kernels.info import info
from transformer_kernels.mask import Mask
from transformer_kernels.varlen import attention_varlen
from transformer_kernels.version import __version__

__all__ = [
    "Alibi",
    "Explanation",
    "Mask",
    "__version__",
    "alibi",
    "alibi_slopes",
    "append_to_cache",
    "attention",
    "attention_decode",
    "attention_varlen",
    "disable",
    "enable",
    "enabled",
    "explain",
    "info",
    "scaled_dot_product_attention",
]
