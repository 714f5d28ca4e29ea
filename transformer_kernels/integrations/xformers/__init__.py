"""The memory-efficient attention of the package xformers, by name and signature.

Examples:
    >>> from transformer_kernels.integrations import xformers as xops
    >>> o = xops.memory_efficient_attention(q, k, v, attn_bias=xops.LowerTriangularMask())

Import it in place of `xformers.ops`, whose `fmha` and `fmha.attn_bias` it has. The functions run on
CPUs and GPUs, in float16, bfloat16, float32 and float64; docs/drop-in.md lists what differs.

Source: Lefaudeux et al. 2022, xFormers; the signatures are those of xFormers 0.0.35.
"""

from torch import unbind

from . import fmha
from .attn_bias import LowerTriangularMask
from .base import AttentionBias
from .fmha import (
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

__all__ = [
    "AttentionBias",
    "LowerTriangularMask",
    "fmha",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "unbind",
]
