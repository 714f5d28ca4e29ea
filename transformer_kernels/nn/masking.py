"""Padding of batches of sequences, and masks that move with their module.

Under `distributed.context_parallel`, lengths are those of the undivided sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.argument_checks import shown
from ..dispatch import division
from ..masks.constraints import Constraint
from ..masks.mask import Mask


def padding_mask(lengths: Tensor | None) -> Mask | None:
    """Mask of trailing padding, given lengths (B,); None means no padding."""
    return None if lengths is None else Mask.padding(lengths)


def check_lengths(name: str, lengths: Tensor | None, *, batch: int, max_length: int) -> None:
    """Checks that `lengths` is None or (batch,) integers from 0 to `max_length`.

    Values are checked on the CPU only, because reading them from a GPU would synchronise.

    Raises:
        TypeError: `lengths` is not an int32 or int64 tensor.
        ValueError: its shape is not (batch,), or a value is out of range.
    """
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"{name} must be a tensor of int32 or int64, got {kind}")
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must be (batch,) = ({batch},), got shape {tuple(lengths.shape)}")
    if division.current is not None:
        max_length *= division.current.ranks
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= max_length:
            raise ValueError(
                f"{name} must be from 0 to {max_length}, the padded length, "
                f"got {length} at index {b}"
            )


def clear_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Sets the padding of x (B, T, width) to 0, given lengths (B,); None means no padding.

    Neither values nor gradients depend on the padding, even if it is NaN.
    """
    if lengths is None:
        return x
    position = division.token_positions(x.shape[1], x.device)
    return x.masked_fill((position >= lengths[:, None])[:, :, None], 0.0)


def masked_mean(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Mean of x (B, T, width) over each sequence without its padding -> (B, width).

    The mean of an empty sequence is 0.
    """
    division.check_undivided("masked_mean")
    total = clear_padding(x, lengths).sum(dim=1)
    if lengths is None:
        return total / max(x.shape[1], 1)
    return total / lengths.clamp(min=1)[:, None]


class MaskBuffer(nn.Module):
    """Holds a mask; calling the module returns it, with its tensors where the module is.

    `module.to(device)` moves the tensors of every `MaskBuffer` in the module. Their dtypes are
    integers and bool, which `module.half()` does not change.

    Examples:
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
