"""The public operators."""

from transformer_kernels.functional.attention import attention
from transformer_kernels.functional.decode import attention_decode
from transformer_kernels.functional.explain import explain
from transformer_kernels.functional.kv_cache import append_to_cache
from transformer_kernels.functional.linear_attention import linear_attention
from transformer_kernels.functional.linear_decode import linear_attention_decode
from transformer_kernels.functional.linear_varlen import linear_attention_varlen
from transformer_kernels.functional.varlen import attention_varlen

__all__ = [
    "append_to_cache",
    "attention",
    "attention_decode",
    "attention_varlen",
    "explain",
    "linear_attention",
    "linear_attention_decode",
    "linear_attention_varlen",
]
