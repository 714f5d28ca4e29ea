"""Rotary position embedding of the new tokens of a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.argument_checks import FLOATS, check_tensor, values_are_readable


@dataclass(frozen=True)
class Rotary:
    """Rotation of pairs of elements by angles that grow with the position.

    Source: Su et al. 2021, arXiv:2104.09864.
    """

    cos: Tensor
    """(positions, rotary_dim / 2)"""
    sin: Tensor
    interleaved: bool
    """True: elements 2n and 2n + 1 are a pair; False: n and n + rotary_dim / 2."""

    @classmethod
    def of(
        cls, cos: Tensor | None, sin: Tensor | None, interleaved: bool, q: Tensor
    ) -> Rotary | None:
        """Checks the arguments of a call; returns None without tables.

        Raises:
            TypeError: a table is not a floating-point tensor.
            ValueError: one table is missing, or they differ in shape, are wider than q, or are on
                another device.
        """
        if cos is None or sin is None:
            if cos is not sin:
                raise ValueError("rotary_cos and rotary_sin must be given together")
            return None
        for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
            check_tensor(name, table, FLOATS, q.device, wanted="a floating-point tensor")
        if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1]:
            raise ValueError(
                "rotary_cos and rotary_sin must be (positions, rotary_dim / 2) with rotary_dim at "
                f"most headdim = {q.shape[-1]}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
            )
        return cls(cos, sin, interleaved)

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates the first rotary_dim elements of each token, in float32 or float64.

        Args:
            x: (batch, tokens, heads, headdim).
            positions: integers (batch, tokens), rows of the tables.

        Returns:
            A tensor like x.

        Raises:
            ValueError: the tables lack a position. Checked on the CPU, outside compiled code.
        """
        self._check_positions(positions)
        accumulate = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (table[positions].unsqueeze(2).to(accumulate) for table in (self.cos, self.sin))
        half = self.cos.shape[1]
        turning, rest = x.split([2 * half, x.shape[-1] - 2 * half], dim=-1)
        pairs = turning.to(accumulate)
        pairs = pairs.unflatten(-1, (half, 2) if self.interleaved else (2, half))
        along = -1 if self.interleaved else -2
        first, second = pairs.unbind(along)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=along)
        return torch.cat([turned.flatten(-2).to(x.dtype), rest], dim=-1)

    def _check_positions(self, positions: Tensor) -> None:
        if not values_are_readable(positions) or positions.numel() == 0:
            return
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.cos.shape[0]:
            raise ValueError(
                f"rotary_cos and rotary_sin must have rows for the positions {low} to {high}, got "
                f"{self.cos.shape[0]} rows"
            )
