"""The functions of the package flash_attn (FlashAttention 2), by name and signature.

Examples:
    >>> from transformer_kernels.integrations.flash_attn import flash_attn_func
    >>> o = flash_attn_func(q, k, v, causal=True)

They run on CPUs and GPUs, in float16, bfloat16, float32 and float64; docs/drop-in.md lists what
differs. `flash_attn.bert_padding` is `bert_padding`.

Source: Dao 2023, arXiv:2307.08691; the signatures are those of flash_attn 2.8.4.
"""

from .dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .kv_cache import flash_attn_with_kvcache
from .varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
