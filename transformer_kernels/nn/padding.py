"""Texts of different lengths in one batch: what lies behind the end of a text is padding."""

from __future__ import annotations

import torch
from torch import Tensor


def check_lengths(name: str, lengths: Tensor | None, *, batch: int, room: int) -> None:
    """TypeError or ValueError unless `lengths` is None or (batch,) integers from 0 to `room`.

    Their values are looked at on the CPU alone, so that nothing waits for a GPU.
    """
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"{name} must be a tensor of int32 or int64, got {kind}")
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must be (batch,) = ({batch},), got shape {tuple(lengths.shape)}")
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= room:
            raise ValueError(
                f"{name} must be from 0 to {room}, the tokens there are, got {length} at {b}"
            )


def clear_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (B, T, width) with 0 for padding, whatever was there: not even NaN reaches a result or a
    gradient from it. Nothing is padding where `lengths` (B,) is None."""
    if lengths is None:
        return x
    position = torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((position >= lengths[:, None])[:, :, None], 0.0)


def mean_of_text(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean of x (B, T, width) over the positions of each text -> (B, width).

    Padding does not count. Of a text of length 0 it is 0.
    """
    total = clear_padding(x, lengths).sum(dim=1)
    if lengths is None:
        return total / max(x.shape[1], 1)
    return total / lengths.clamp(min=1)[:, None]
