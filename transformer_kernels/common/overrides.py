"""Arguments that stand for tensors by torch's protocol `__torch_function__`, such as the proxies of
torch.fx. Tensor subclasses are tensors: they run as others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

_Result = TypeVar("_Result")


def is_overridden(*arguments: object) -> bool:
    """True if an argument is not a tensor, but stands for one."""
    return has_torch_function(arguments) and any(map(_is_stand_in, arguments))


def overridden(function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Returns what the stand-ins make of a call; a proxy of torch.fx makes it a node of its graph.

    Options that are the defaults of the function are left out.
    """
    defaults = inspect.signature(function).parameters
    given = {name: x for name, x in options.items() if x is not defaults[name].default}
    stand_ins = [x for x in (*arguments, *given.values()) if _is_stand_in(x)]
    result: _Result = handle_torch_function(function, stand_ins, *arguments, **given)
    return result


def _is_stand_in(x: object) -> bool:
    return not isinstance(x, Tensor) and hasattr(type(x), "__torch_function__")
