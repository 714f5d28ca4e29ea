"""Adapter for HuggingFace transformers: `attn_implementation="transformer_kernels"`.

Examples:
    >>> from transformer_kernels.integrations import huggingface
    >>> huggingface.register()
    >>> model = AutoModel.from_pretrained(name, attn_implementation="transformer_kernels")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...common.argument_checks import check_bool
from ...common.optional_deps import require
from ...dispatch import division
from .attention import attention_forward
from .divided import watched_models
from .linear_layers import link, prepare, set_mode
from .mask import create_mask
from .models import NAME, check_requests
from .structure import recognised

if TYPE_CHECKING:
    from .int8_cache import Int8Cache

__all__ = ["NAME", "Int8Cache", "register"]


def __getattr__(name: str) -> Any:
    """Imports `Int8Cache` when it is used: it is a class of transformers."""
    if name != "Int8Cache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("transformers", extra="huggingface")
    from .int8_cache import Int8Cache

    return Int8Cache


def register(*, linear_layers: bool | None = None) -> None:
    """Makes `attn_implementation="transformer_kernels"` available in HuggingFace transformers.

    Call it before a model is created with that name, or before `model.set_attn_implementation`.
    It registers an attention function and a mask function; no model changes by itself. A model that
    does not call `transformers.AttentionInterface` then raises a ValueError when it is asked for
    this name.

    Models with that name run our kernels in their linear layers too: gated delta rule, KDA,
    Mamba-2, lightning attention, and the causal convolutions of all of these. The functions that
    layers call are replaced in the files of those models; other models run the original ones.

    A later call with the same argument has no effect.

    Args:
        linear_layers: which models run our kernels in their linear layers. None: those with our
            attention. True: all models, also those made before. False: none; what was replaced is
            restored.

    Raises:
        TypeError: linear_layers is not a bool or None.
        ImportError: transformers is not installed, or older than 5.4.

    Source: docs/quickstarts/transformers.md, docs/drop-in.md.
    """
    if linear_layers is not None:
        check_bool("linear_layers", linear_layers)
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
    check_requests(attention_forward, prepare, link)
    set_mode(linear_layers)
    if watched_models not in division.watchers:
        division.watchers.append(watched_models)
