"""The kernel "attention": an attention function for models of transformers.

transformers registers it by a name of the hub. Loading it makes transformers give that name the
masks of this package, and models that do not call `transformers.AttentionInterface` refuse it.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..huggingface.attention import attention_forward as flash_attn_forward
from ..huggingface.mask import create_mask
from ..huggingface.models import check_requests, serve_masks

__all__ = ["flash_attn_forward", "supports_flash_attn"]

supports_flash_attn = True
"""By it transformers tells an attention function from other kernels."""

if find_spec("transformers") is not None:
    serve_masks(flash_attn_forward, create_mask)
    check_requests(flash_attn_forward)
