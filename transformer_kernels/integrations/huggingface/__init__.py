"""Adapter for HuggingFace transformers: `attn_implementation="transformer_kernels"`.

>>> from transformer_kernels.integrations import huggingface
>>> huggingface.register()
>>> model = AutoModel.from_pretrained(name, attn_implementation="transformer_kernels")
"""

from __future__ import annotations

from ...common.optional_deps import require
from ...dispatch import division
from .attention import attention_forward
from .divided import watched_models
from .mask import create_mask
from .models import check_requests
from .structure import recognised

__all__ = ["NAME", "register"]

NAME = "transformer_kernels"
"""The value of `attn_implementation`."""


def register() -> None:
    """Makes `attn_implementation="transformer_kernels"` available in HuggingFace transformers.

    Call it before a model is created with that name, or before `model.set_attn_implementation`.
    It registers an attention function and a mask function; no model changes by itself. A model that
    does not call `transformers.AttentionInterface` then raises a ValueError when it is asked for
    this name. A second call has no effect.

    Raises:
        ImportError: transformers is not installed, or older than 5.4.

    Source: docs/drop-in.md.
    """
    require("transformers", extra="huggingface")
    import transformers

    if [int(number) for number in transformers.__version__.split(".")[:2]] < [5, 4]:
        raise ImportError(  # older ones describe masks by `cache_position`
            f"register() needs transformers 5.4 or later, got {transformers.__version__}",
            name="transformers",
        )
    recognised()  # compares the library's mask functions now, not inside a model's first call
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, create_mask)
    check_requests(attention_forward)
    if watched_models not in division.watchers:
        division.watchers.append(watched_models)
