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

from ...common.argument_checks import shown
from ...common.torch_private import constant_in_compiled_code

NAME = "transformer_kernels"
"""The value of `attn_implementation`."""

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\([^)]*nn\.Module", re.MULTILINE)
_TABLE_OF_CLASSES = re.compile(r"ATTENTION_CLASSES\[[\w.]*attn_implementation\]")

_Function = Callable[..., Any]


def _nothing(*_: object, **__: object) -> None:
    pass


@cache
def check_requests(
    attention_forward: _Function,
    prepare: _Function = _nothing,
    link: Callable[[Any], None] = _nothing,
) -> None:
    """Makes models raise a ValueError if they are asked for a function that they do not call.

    Three methods of `transformers.PreTrainedModel` are wrapped: the constructor's check of the
    name, its last step, and `set_attn_implementation`, which otherwise only warns. Other names pass
    through.

    Args:
        attention_forward: the function whose registered names are ours.
        prepare: called for the class of each model, before its layers are made; `asks` says whether
            its name is ours.
        link: called for each model, when its layers are there.
    """
    from transformers import AttentionInterface, PreTrainedModel

    library: Any = PreTrainedModel
    check_name = library._check_and_adjust_attn_implementation
    set_name = library.set_attn_implementation
    finish = library.post_init
    functions = AttentionInterface()  # type: ignore[no-untyped-call]

    @wraps(check_name)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = check_name(self, *args, **kwargs)
        is_ours = functions.get(name) is attention_forward
        if is_ours:
            check_model(type(self), name)
        prepare(type(self), asks=is_ours)
        return name

    @wraps(finish)
    def finished(self: Any, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        link(self)

    @wraps(set_name)
    def set_checked(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        if (
            isinstance(attn_implementation, str)
            and functions.get(attn_implementation) is attention_forward
        ):
            for module in self.modules():
                if isinstance(module, PreTrainedModel):
                    check_model(type(module), attn_implementation)
        set_name(self, attn_implementation, *args, **kwargs)
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                name = module.config._attn_implementation
                prepare(type(module), asks=functions.get(name) is attention_forward)
                link(module)

    library._check_and_adjust_attn_implementation = checked
    library.post_init = finished
    library.set_attn_implementation = set_checked


@cache
def serve_masks(attention_forward: _Function, create_mask: _Function) -> None:
    """Gives each name that is registered for an attention function from now on its mask function.

    transformers registers a kernel of the hub with the masks of "sdpa". Other names pass through.

    Args:
        attention_forward: the function whose names these are.
        create_mask: the mask function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    library: Any = AttentionMaskInterface
    register = library.register
    functions = AttentionInterface()  # type: ignore[no-untyped-call]

    @wraps(register)
    def register_ours(key: str, value: _Function) -> None:
        register(key, create_mask if functions.get(key) is attention_forward else value)

    library.register = staticmethod(register_ours)


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
    """Returns True if a model computes attention without `transformers.AttentionInterface`.

    Its file then has attention modules, none of which calls the interface, or chooses classes by
    the name of an implementation. A class that adds to a model is served as that model is.
    """
    from transformers import PreTrainedModel

    has_own = False
    for base in model.__mro__:
        if not issubclass(base, PreTrainedModel) or base.__name__.endswith("PreTrainedModel"):
            continue
        code = source_of(sys.modules.get(base.__module__)) or ""  # none in a notebook
        if _TABLE_OF_CLASSES.search(code):
            return True
        if "ALL_ATTENTION_FUNCTIONS" in code:
            return False
        has_own = has_own or _ATTENTION_CLASS.search(code) is not None
    return has_own


@constant_in_compiled_code
def is_passed_by(module: type, name: str) -> bool:
    """Returns True if the code of an attention module names an argument that it passes on.

    Others come from the call of the model, whose arguments are passed from layer to layer.
    """
    names = _names_in(module)
    return names is None or name in names


@cache
def _names_in(module: type) -> frozenset[str] | None:
    code = source_of(module)
    return None if code is None else frozenset(re.findall(r"\b(\w+)[\"']?\s*[=:]", code))


def source_of(definition: object) -> str | None:
    """Returns the code of a class or a module, if there is a file."""
    try:
        return inspect.getsource(definition)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
