"""The `Mask` class: the visible (query, key) pairs, as an intersection of constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels.masks import visualize
from transformer_kernels.masks.constraints import (
    Align,
    BlockSparse,
    Constraint,
    Dense,
    KeyRange,
    Segments,
    Window,
)
from transformer_kernels.storage import check_storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Mask:
    """Attention mask: an intersection of constraints on the visible (query, key) pairs.

    Build masks with the constructors below and combine them with `a & b`. `Mask()` makes every pair
    visible. Indices are b for batch entries, h for query heads, i for queries (0 to M - 1) and j
    for keys (0 to N - 1). A mask has no sizes of its own: each call resolves it against its sizes
    and checks it then.

    >>> mask = Mask.causal() & Mask.padding(key_lengths)
    >>> o = attention(q, k, v, mask=mask)
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
        """Sliding window: i + d - left <= j <= i + d + right is visible.

        Args:
            left: visible keys before the diagonal; None is unbounded. May be negative.
            right: visible keys after the diagonal; None is unbounded. May be negative.
            align: "top_left" (d = 0) or "bottom_right" (d = N - M), which differ if M != N.
        """
        if align not in ("top_left", "bottom_right"):
            raise ValueError(f"align must be 'top_left' or 'bottom_right', got {align!r}")
        for name, bound in (("left", left), ("right", right)):
            if bound is not None and (isinstance(bound, bool) or not _is_int(bound)):
                raise TypeError(f"{name} must be an int or None, got {bound!r}")
        return Mask((Window(_bounded(left), _bounded(right), align),))

    @staticmethod
    def causal(*, align: Align = "top_left") -> Mask:
        """Causal mask: j <= i + d is visible.

        Args:
            align: "top_left" (d = 0), as `is_causal` of torch; or "bottom_right" (d = N - M), as
                flash-attn: the last query sees every key, which decoding needs.
        """
        return Mask.window(None, 0, align=align)

    @staticmethod
    def padding(key_lengths: Tensor) -> Mask:
        """Padding mask: j < key_lengths[b] is visible.

        Args:
            key_lengths: integers (B,). Keys and values at and after the length are trailing
                padding: they may hold NaN, and affect neither outputs nor gradients.
        """
        return Mask((KeyRange(None, _vector("key_lengths", key_lengths)),))

    @staticmethod
    def key_range(start: Tensor, end: Tensor) -> Mask:
        """Key range: start[b] <= j < end[b] is visible, for example to mask left padding.

        Args:
            start: integers (B,), inclusive.
            end: integers (B,), exclusive. Keys and values outside the range may hold NaN.
        """
        return Mask((KeyRange(_vector("start", start), _vector("end", end)),))

    @staticmethod
    def segments(q_ids: Tensor, k_ids: Tensor | None = None) -> Mask:
        """Segment mask: q_ids[b, i] == k_ids[b, j] is visible, for documents packed into one row.

        Args:
            q_ids: integers (B, M), the segment id of each query.
            k_ids: integers (B, N), the segment id of each key. Default: q_ids.
        """
        k_ids = q_ids if k_ids is None else k_ids
        for name, ids in (("q_ids", q_ids), ("k_ids", k_ids)):
            _integers(name, ids)
            if ids.dim() != 2:
                raise ValueError(f"{name} must be (batch, length), got shape {tuple(ids.shape)}")
        return Mask((Segments(q_ids, k_ids),))

    @staticmethod
    def dense(attn_mask: Tensor) -> Mask:
        """Dense mask: attn_mask[b, h, i, j] is visible.

        Args:
            attn_mask: bool tensor broadcastable to (B, H, M, N), any strides; True = visible.
        """
        if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
            raise TypeError(f"attn_mask must be a bool tensor, got {_describe(attn_mask)}")
        if attn_mask.dim() > 4:
            raise ValueError(
                f"attn_mask must broadcast to (B, H, M, N), got shape {tuple(attn_mask.shape)}"
            )
        return Mask((Dense(attn_mask[(None,) * (4 - attn_mask.dim())]),))

    @staticmethod
    def block_sparse(layout: Tensor, block_size: int) -> Mask:
        """Block-sparse mask: layout[h, i // block_size, j // block_size] is visible.

        Args:
            layout: bool (H or 1, ceil(M / block_size), ceil(N / block_size)), or without the first
                dimension. `transformer_kernels.masks.block_patterns` builds the usual patterns.
            block_size: queries and keys per block, at least 1.

        Source: Child et al. 2019, arXiv:1904.10509.
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
        """Returns the mask as a dense bool tensor (B, H, M, N); True = visible.

        This is the specification of the mask, for tests and debugging. It needs B * H * M * N
        bytes.

        Args:
            B: batch size.
            H: query heads.
            M: queries.
            N: keys.
            device: device of the result. Default: that of the mask's tensors, else the CPU.

        Raises:
            ValueError: a tensor of the mask does not fit these sizes.
        """
        self.check(B, H, M, N)
        target = torch.device(device) if device is not None else self.device or torch.device("cpu")
        visible = torch.ones(B, H, M, N, dtype=torch.bool, device=target)
        for constraint in self.constraints:
            visible = visible & constraint.visible(M, N, target)
        return visible

    def check(self, B: int, H: int, M: int, N: int) -> None:
        """Raises ValueError if a tensor of the mask does not fit these sizes, or has no memory."""
        check_storage((f"the mask's {name}", x) for name, x in self.tensors())
        for constraint in self.constraints:
            constraint.check(B, H, M, N)

    def to(self, device: torch.device | str) -> Mask:
        """Returns the same mask with its tensors on `device`."""
        return Mask(tuple(_to_device(constraint, device) for constraint in self.constraints))

    @property
    def device(self) -> torch.device | None:
        """Device of the mask's tensors; None if it has no tensors."""
        tensors = self.tensors()
        return tensors[0][1].device if tensors else None

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Returns ("Constraint.field", tensor) for every tensor of the mask."""
        return [
            (f"{type(constraint).__name__}.{field}", value)
            for constraint in self.constraints
            for field, value in constraint.tensors().items()
        ]

    def show(self, M: int, N: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """Renders the mask as text: one row per query, one column per key, at most 64 x 64.

        Args:
            M: queries.
            N: keys. Default: M.
            batch: batch entry to render.
            head: query head to render.
        """
        return visualize.as_text(self._slice(M, M if N is None else N, batch, head))

    def plot(self, M: int, N: int | None = None, *, batch: int = 0, head: int = 0) -> Axes:
        """Plots the mask with matplotlib (`pip install transformer_kernels[train]`).

        Takes the arguments of `show`; returns the matplotlib axes.
        """
        return visualize.as_plot(self._slice(M, M if N is None else N, batch, head))

    def _slice(self, M: int, N: int, batch: int, head: int) -> Tensor:
        """The (M, N) slice of one batch entry and head."""
        extents = [
            constraint.visible(M, N, self.device or torch.device("cpu")).shape[:2]
            for constraint in self.constraints
        ]
        B = max([b for b, _ in extents], default=1)
        H = max([h for _, h in extents], default=1)
        return self.materialize(B, H, M, N)[min(batch, B - 1), min(head, H - 1)]


def _to_device(constraint: Constraint, device: torch.device | str) -> Constraint:
    fields: dict[str, Any] = {name: x.to(device) for name, x in constraint.tensors().items()}
    return replace(constraint, **fields)


def _bounded(bound: int | None) -> int | None:
    """The bound of a window, cut off beyond every index: diagonals then fit in 64 bits."""
    return None if bound is None else max(-(1 << 62), min(bound, 1 << 62))


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
