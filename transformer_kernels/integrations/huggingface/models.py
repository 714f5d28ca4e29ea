"""Models that our name serves: the others get an error when they ask for it.

transformers checks whether a model supports "sdpa" or flash attention, but no other name: a model
that computes attention in its own code accepts any, and runs its own.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from transformer_kernels.argument_checks import shown

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\([^)]*nn\.Module", re.MULTILINE)

_Function = Callable[..., Any]


@cache
def check_requests(attention_forward: _Function) -> None:
    """Makes models check each request for an attention function, at once and later.

    Two methods of `transformers.PreTrainedModel` are wrapped: the constructor's check of the name,
    and `set_attn_implementation`. Other names pass through.

    Args:
        attention_forward: the function whose registered names are ours.
    """
    from transformers import AttentionInterface, PreTrainedModel

    library: Any = PreTrainedModel
    check_name, set_name = (
        library._check_and_adjust_attn_implementation,
        library.set_attn_implementation,
    )
    functions = AttentionInterface()

    @wraps(check_name)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = check_name(self, *args, **kwargs)
        if functions.get(name) is attention_forward:
            check_model(type(self), name)
        return name

    @wraps(set_name)
    def set_checked(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            isinstance(attn_implementation, str)
            and functions.get(attn_implementation) is attention_forward
        ):
            for module in self.modules():
                if isinstance(module, PreTrainedModel):
                    check_model(type(module), attn_implementation)
        return set_name(self, attn_implementation, *args, **kwargs)

    library._check_and_adjust_attn_implementation = checked
    library.set_attn_implementation = set_checked


def check_model(model: type, name: str) -> None:
    """Raises ValueError for a class of models that does not call `transformers.AttentionInterface`.

    Args:
        model: a subclass of PreTrainedModel.
        name: the requested attn_implementation.
    """
    if not has_own_attention(model):
        return
    others = '"eager"'
    if getattr(model, "_supports_sdpa", False):
        others += ', or "sdpa" inside transformer_kernels.enabled()'
    raise ValueError(
        f"{model.__name__} computes attention in its own code ({model.__module__}), which "
        f"attn_implementation={shown(name)} cannot replace: use {others}. A dict chooses for the "
        f'parts of a model: {{"text_config": {shown(name)}, "vision_config": "eager"}}'
    )


@cache
def has_own_attention(model: type) -> bool:
    """Returns True if the file that defines a model has attention modules, none of which calls
    `transformers.AttentionInterface`.

    Bases decide for a class without a file, as in a notebook. A file without attention modules has
    models made of others.
    """
    for base in model.__mro__:
        try:
            code = inspect.getsource(sys.modules[base.__module__])
        except (KeyError, OSError, TypeError):
            continue
        if base.__module__ == "transformers.modeling_utils":
            break
        return _ATTENTION_CLASS.search(code) is not None and "ALL_ATTENTION_FUNCTIONS" not in code
    return False
