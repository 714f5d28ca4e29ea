"""The kernel "attention": an attention function that transformers calls with the model's mask."""

from __future__ import annotations

from transformer_kernels.integrations.huggingface.attention import (
    attention_forward as flash_attn_forward,
)

__all__ = ["flash_attn_forward", "supports_flash_attn"]

supports_flash_attn = True
"""By it transformers tells an attention function from other kernels."""
