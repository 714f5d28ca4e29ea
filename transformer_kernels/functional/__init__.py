"""The public operators."""

from transformer_kernels.functional.attention import attention
from transformer_kernels.functional.decode import attention_decode
from transformer_kernels.functional.explain import explain
from transformer_kernels.functional.kv_cache import append_to_cache
from transformer_kernels.functional.varlen import attention_varlen

__all__ = ["append_to_cache", "attention", "attention_decode", "attention_varlen", "explain"]
