"""Unions of masks, such as a causal mask or blocks, as intervals of positions.

A query sees the keys of an interval, or all but those. A union of windows, prefixes and blocks is
an intersection of a few of these, without memory for pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .constraints import Constraint, Intervals, Window


def prefix_lm(prefix_lengths: Tensor, length: int) -> tuple[Constraint, ...]:
    index = torch.arange(length, device=prefix_lengths.device)[None]
    return (Intervals(None, torch.maximum(index, prefix_lengths.long()[:, None] - 1), index),)


def blocks(ids: Tensor) -> tuple[Constraint, ...]:
    _, end = runs(ids)
    index = torch.arange(ids.shape[1], device=ids.device)[None]
    return (Intervals(None, torch.where(ids >= 0, end, index), index),)


def shared_prefix(ids: Tensor) -> tuple[Constraint, ...]:
    """Hides the keys between the first run and the query's own."""
    start, end = runs(ids)
    index = torch.arange(ids.shape[1], device=ids.device)[None]
    between = Intervals(end[:, :1].expand_as(end) + 1, start - 1, index, inside=False)
    return between, Window(None, 0, "top_left")


def global_window(
    length: int, tokens: int, window: int, device: torch.device | str | None
) -> tuple[Constraint, ...]:
    """Hides the keys between the global ones and the window, and those after the window."""
    index = torch.arange(length, device=device)[None]
    is_global = index < tokens
    low = torch.where(is_global, 0, index - window)
    high = torch.where(is_global, length, (index + window).clamp(min=tokens - 1))
    between = Intervals(torch.full_like(low, tokens), low - 1, index, inside=False)
    return between, Intervals(None, high, index)


def block_diffusion(
    length: int, block: int, device: torch.device | str | None
) -> tuple[Constraint, ...]:
    """Clean blocks have the positions from 0 on, noisy ones those after them.

    Of these, a noisy block hides the clean ones from its own number on and the noisy ones before
    its own, which lie next to each other, and the noisy ones after its own.
    """
    clean = torch.arange(length, device=device)[None] // block
    count = -(-length // block)
    noisy, end = clean + count, torch.full_like(clean, 2 * count)
    k_pos = torch.cat([noisy, clean], dim=1)
    hidden = torch.cat([clean, clean + 1], dim=1), torch.cat([noisy, end], dim=1) - 1
    return (
        Intervals(*hidden, k_pos, inside=False),
        Intervals(None, torch.cat([noisy, end], dim=1), k_pos),
    )


def runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first and the last index of the run of equal ids that each token is in.

    Args:
        ids: integers (B, length).

    Returns:
        Two int64 tensors (B, length).
    """
    index = torch.arange(ids.shape[1], device=ids.device)[None]
    changes = ids[:, 1:] != ids[:, :-1]
    is_start = functional.pad(changes, (1, 0), value=True)
    is_end = functional.pad(changes, (0, 1), value=True)
    start = torch.where(is_start, index, 0).cummax(1).values
    end = torch.where(is_end, index, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return start, end
