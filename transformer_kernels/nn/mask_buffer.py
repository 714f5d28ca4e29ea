"""A mask whose tensors are buffers of a module, and follow it to another device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from torch import nn

from ..common.argument_checks import shown
from ..masks.constraints import Constraint
from ..masks.mask import Mask


class MaskBuffer(nn.Module):
    """Holds a mask; calling the module returns it, with its tensors where the module is.

    `module.to(device)` moves the tensors of every `MaskBuffer` in the module. Their dtypes are
    integers and bool, which `module.half()` does not change.

    >>> self.mask = MaskBuffer(Mask.causal() & Mask.dense(pattern))  # in __init__ of a module
    >>> o = attention(q, k, v, mask=self.mask())  # in its forward

    Args:
        mask: the mask.
        persistent: True to have the tensors in the module's state_dict.

    Raises:
        TypeError: mask is not a Mask.
    """

    def __init__(self, mask: Mask, *, persistent: bool = False) -> None:
        super().__init__()
        if not isinstance(mask, Mask):
            raise TypeError(f"mask must be a Mask, got {shown(mask)}")
        self._kinds: list[_Kind] = []
        for index, constraint in enumerate(mask.constraints):
            tensors = {f"{field}_{index}": x for field, x in constraint.tensors().items()}
            for name, x in tensors.items():
                self.register_buffer(name, x, persistent=persistent)
            self._kinds.append(_Kind(type(constraint), _options(constraint), tuple(tensors)))

    def forward(self) -> Mask:
        return Mask(tuple(map(self._constraint, self._kinds)))

    def _constraint(self, kind: _Kind) -> Constraint:
        tensors = {name.rpartition("_")[0]: getattr(self, name) for name in kind.buffers}
        return kind.type(**kind.options, **tensors)


class _Kind(NamedTuple):
    """A constraint without its tensors."""

    type: Callable[..., Constraint]
    options: dict[str, Any]
    buffers: tuple[str, ...]
    """Names of the buffers that hold its tensors: the field, "_" and a number."""


def _options(constraint: Constraint) -> dict[str, Any]:
    tensors = constraint.tensors()
    return {
        field.name: getattr(constraint, field.name)
        for field in fields(constraint)
        if field.name not in tensors
    }
