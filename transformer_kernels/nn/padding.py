"""Batches of sequences with trailing padding: checks of the lengths, masking and pooling.

Under `distributed.context_parallel`, lengths are those of the undivided sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import division


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
