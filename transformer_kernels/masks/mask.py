"""Masks are data: which key each query may attend to, as an intersection of small constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels.masks import visualize as mask_picture
from transformer_kernels.masks.constraints import (
    Align,
    BlockSparse,
    Constraint,
    Dense,
    KeyRange,
    Segments,
    Window,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Mask:
    """What may attend to what. Build one with the constructors below; `a & b` intersects.

    Indices are i for queries (0..M-1) and j for keys (0..N-1). A mask knows no sizes of its own:
    it is bound to them when it is used, and checked then.
    """

    constraints: tuple[Constraint, ...] = ()

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(self.constraints + other.constraints)

    @staticmethod
    def window(
        left: int | None = None, right: int | None = None, *, align: Align = "top_left"
    ) -> Mask:
        """Sliding window: i + d - left <= j <= i + d + right; None is unbounded.

        `align` says which corner the diagonal starts from when M != N: "top_left" (d = 0) or
        "bottom_right" (d = N - M). The bounds may be negative.
        """
        if align not in ("top_left", "bottom_right"):
            raise ValueError(f"align must be 'top_left' or 'bottom_right', got {align!r}")
        for name, bound in (("left", left), ("right", right)):
            if bound is not None and (isinstance(bound, bool) or not _is_int(bound)):
                raise TypeError(f"{name} must be an int or None, got {bound!r}")
        return Mask((Window(left, right, align),))

    @staticmethod
    def causal(*, align: Align = "top_left") -> Mask:
        """j <= i (+ N - M for "bottom_right").

        "top_left" is torch's `is_causal`; "bottom_right" is flash-attn's, and what decoding needs:
        the last query sees every key.
        """
        return Mask.window(None, 0, align=align)

    @staticmethod
    def padding(key_lengths: Tensor) -> Mask:
        """j < key_lengths[b]; `key_lengths` is (B,), integers. Keys behind it are never read."""
        return Mask((KeyRange(None, _vector("key_lengths", key_lengths)),))

    @staticmethod
    def key_range(start: Tensor, end: Tensor) -> Mask:
        """start[b] <= j < end[b]; both (B,), integers (left padding, for instance)."""
        return Mask((KeyRange(_vector("start", start), _vector("end", end)),))

    @staticmethod
    def segments(q_ids: Tensor, k_ids: Tensor | None = None) -> Mask:
        """Visible where the ids agree: several documents packed in one row.

        q_ids is (B, M) and k_ids (B, N), integers; k_ids defaults to q_ids.
        """
        k_ids = q_ids if k_ids is None else k_ids
        for name, ids in (("q_ids", q_ids), ("k_ids", k_ids)):
            _integers(name, ids)
            if ids.dim() != 2:
                raise ValueError(f"{name} must be (batch, length), got shape {tuple(ids.shape)}")
        return Mask((Segments(q_ids, k_ids),))

    @staticmethod
    def dense(shown: Tensor) -> Mask:
        """Any bool tensor broadcastable to (B, H, M, N), any strides; True = visible."""
        if not isinstance(shown, Tensor) or shown.dtype != torch.bool:
            raise TypeError(f"a dense mask must be a bool tensor, got {_describe(shown)}")
        if shown.dim() > 4:
            raise ValueError(
                "a dense mask must broadcast to (B, H, M, N), got shape " + str(tuple(shown.shape))
            )
        return Mask((Dense(shown[(None,) * (4 - shown.dim())]),))

    @staticmethod
    def block_sparse(layout: Tensor, block_size: int) -> Mask:
        """Visible where layout[h, i // block_size, j // block_size] is True.

        `layout` is bool, (H or 1, ceil(M / block_size), ceil(N / block_size)), or without the
        first dimension; `transformer_kernels.masks.block_patterns` makes the usual ones.
        """
        if not isinstance(layout, Tensor) or layout.dtype != torch.bool:
            raise TypeError(f"layout must be a bool tensor, got {_describe(layout)}")
        if layout.dim() not in (2, 3):
            raise ValueError(
                f"layout must be (H or 1, rows, columns), got shape {tuple(layout.shape)}"
            )
        if not _is_int(block_size) or isinstance(block_size, bool):
            raise TypeError(f"block_size must be an int, got {block_size!r}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        return Mask((BlockSparse(layout if layout.dim() == 3 else layout[None], block_size),))

    def materialize(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> Tensor:
        """The full bool tensor (B, H, M, N): the specification, M x N memory, for tests and eyes.

        `device` defaults to that of the mask's own tensors, or the CPU.
        """
        self.check(B, H, M, N)
        where = torch.device(device) if device is not None else self.device or torch.device("cpu")
        shown = torch.ones(B, H, M, N, dtype=torch.bool, device=where)
        for constraint in self.constraints:
            shown = shown & constraint.visible(M, N, where)
        return shown

    def check(self, B: int, H: int, M: int, N: int) -> None:
        """Raises ValueError where a constraint's tensors do not fit these sizes."""
        for constraint in self.constraints:
            constraint.check(B, H, M, N)

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on another device."""
        return Mask(tuple(_moved(constraint, device) for constraint in self.constraints))

    @property
    def device(self) -> torch.device | None:
        """Where the mask's tensors are; None when it holds none."""
        tensors = self.tensors()
        return tensors[0][1].device if tensors else None

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor in the mask, with the name of its constraint and field."""
        return [
            (f"{type(constraint).__name__}.{field}", value)
            for constraint in self.constraints
            for field, value in constraint.tensors().items()
        ]

    def show(self, M: int, N: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """A picture in text: one row a query, one column a key, shrunk to at most 64 by 64."""
        return mask_picture.as_text(self._slice(M, M if N is None else N, batch, head))

    def plot(self, M: int, N: int | None = None, *, batch: int = 0, head: int = 0) -> Axes:
        """The same picture by matplotlib (install transformer_kernels[train]); returns its axes."""
        return mask_picture.as_plot(self._slice(M, M if N is None else N, batch, head))

    def _slice(self, M: int, N: int, batch: int, head: int) -> Tensor:
        extents = [
            constraint.visible(M, N, self.device or torch.device("cpu")).shape[:2]
            for constraint in self.constraints
        ]
        B = max([b for b, _ in extents], default=1)
        H = max([h for _, h in extents], default=1)
        return self.materialize(B, H, M, N)[min(batch, B - 1), min(head, H - 1)]


def _moved(constraint: Constraint, device: torch.device | str) -> Constraint:
    fields: dict[str, Any] = {name: x.to(device) for name, x in constraint.tensors().items()}
    return replace(constraint, **fields)


def _is_int(value: object) -> bool:
    return isinstance(value, int | torch.SymInt)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of dtype {value.dtype}"
    return f"{type(value).__name__}"


def _integers(name: str, value: Tensor) -> None:
    integral = isinstance(value, Tensor) and not (
        value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool
    )
    if not integral:
        raise TypeError(f"{name} must be a tensor of integers, got {_describe(value)}")


def _vector(name: str, value: Tensor) -> Tensor:
    _integers(name, value)
    if value.dim() != 1:
        raise ValueError(f"{name} must be (batch,), got shape {tuple(value.shape)}")
    return value
