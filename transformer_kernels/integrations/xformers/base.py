"""What the bias classes share: the lengths of packed sequences, windows, and `materialize`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...common.argument_checks import check_int, shown
from ...masks.constraints import Align
from ...masks.mask import Mask

Device = torch.device | str | None
_CLASSES: dict[str, type[AttentionBias]] = {}
"""The bias classes by name."""


class AttentionBias:
    """Base class of the biases."""

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith(f"{__package__}."):  # others may show other pairs
            _CLASSES[cls.__name__] = cls

    align: ClassVar[Align] = "bottom_right"
    is_causal: ClassVar[bool] = False

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns the bias as a tensor (..., M, N) of this shape: 0 if visible, else -inf.

        This is the specification of the class, for tests. It needs memory for all pairs.
        """
        visible = self._visible(*shape[-2:]).to(device)
        bias = torch.zeros(visible.shape, dtype=dtype, device=device)
        bias = bias.masked_fill_(~visible, float("-inf")).expand(*shape[:-1], -1)
        added = getattr(self, "_bias", None)
        return bias if added is None else bias + added.to(device, dtype)

    def _visible(self, M: int, N: int) -> Tensor:
        """Returns bool (M, rows of keys), on the CPU."""
        return window_of(self).materialize(1, 1, M, N, "cpu")[0, 0]

    def to(self, device: torch.device | str) -> Self:
        """Returns the bias with its tensors on `device`."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor | SeqLenInfo):
                setattr(moved, name, value.to(device))
        return moved


def known(bias: object) -> bool:
    """True if `window_of` reads the bias."""
    return type(bias).__name__ in _CLASSES


def window_of(bias: Any) -> Mask:
    """Returns the causal mask or the window of a bias, for each of its sequences.

    Args:
        bias: of a class here, or one of xFormers with the same name and fields.

    Raises:
        TypeError: the bias lacks a field, as those of another version of xFormers may.
    """
    kind = _CLASSES[type(bias).__name__]
    lacking = [x for x in getattr(kind, "__dataclass_fields__", ()) if not hasattr(bias, x)]
    if lacking:
        raise TypeError(
            f"attn_bias must have the fields of xFormers 0.0.35, got {type(bias).__name__} without "
            f"{', '.join(lacking)}"
        )
    size = getattr(bias, "_window_size", None)
    if size is not None:
        return Mask.window(size - 1, 0, align=kind.align)
    if hasattr(bias, "window_left"):
        return Mask.window(bias.window_left, bias.window_right, align=kind.align)
    return Mask.causal(align=kind.align) if kind.is_causal else Mask()


@dataclass
class SeqLenInfo:
    """The sequences of a batch in one dimension: `_SeqLenInfo` and `_PaddedSeqLenInfo` of xFormers.

    `seqstart` (B + 1,) int32 holds the starts, and the end of the last sequence; the lists have the
    same values. With room for `padding` tokens each, `seqlen` (B,) int32 holds the lengths.
    """

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]
    seqlen: Tensor | None = None
    seqlen_py: list[int] | None = None
    padding: int | None = None

    @classmethod
    def from_seqlens(
        cls, seqlens: Sequence[int], *, device: Device = None, name: str = "seqlens"
    ) -> SeqLenInfo:
        """`name` is the argument that error messages name."""
        lengths = _lengths(name, seqlens)
        starts = list(accumulate(lengths, initial=0))
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        return cls(_vector(starts, device), longest, shortest, starts)

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: Device = None, name: str = "seqlens"
    ) -> SeqLenInfo:
        """Sequences with room for `padding` tokens each."""
        check_int("kv_padding", padding, 1)
        lengths = _lengths(name, seqlens, padding)
        room = cls.from_seqlens([padding] * len(lengths), device=device)
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        own = _vector(lengths, device), lengths, padding
        return cls(room.seqstart, longest, shortest, room.seqstart_py, *own)

    def to(self, device: torch.device | str) -> SeqLenInfo:
        own = None if self.seqlen is None else self.seqlen.to(device)
        return replace(self, seqstart=self.seqstart.to(device), seqlen=own)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Returns the start and the end of each sequence, without the room after it."""
        if self.seqlen_py is None:
            return pairwise(self.seqstart_py)
        ends = (start + n for start, n in zip(self.seqstart_py, self.seqlen_py, strict=False))
        return zip(self.seqstart_py, ends, strict=False)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Splits x (1, M, ...) into (b, length, ...), of b sequences of equal lengths each."""
        M = self.seqstart_py[-1]
        if self.seqlen is not None or x.dim() < 2 or x.shape[:2] != (1, M):
            raise ValueError(f"tensor must be (1, {M}, ...), without padding, got {shown(x)}")
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        ends = [self.seqstart_py[n] for n in accumulate(sizes, initial=0)]
        parts = x.split([end - start for start, end in pairwise(ends)], dim=1)
        return [
            part.reshape(b, part.shape[1] // b, *x.shape[2:])
            for b, part in zip(sizes, parts, strict=True)
        ]


class PackedBias(AttentionBias):
    """Sequences packed into one row: a query sees keys of its own sequence only."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    def _visible(self, M: int, N: int) -> Tensor:
        rows, keys, width = self._key_rows()
        if (self.q_seqinfo.seqstart_py[-1], keys) != (M, N):
            wanted = f"(..., {self.q_seqinfo.seqstart_py[-1]}, {keys})"
            raise ValueError(f"shape must be {wanted}, got (..., {M}, {N})")
        window, visible = window_of(self), torch.zeros(M, width, dtype=torch.bool)
        for (start, end), own in zip(self.q_seqinfo.intervals(), rows, strict=True):
            visible[start:end, own] |= window.materialize(1, 1, end - start, len(own))[0, 0]
        return visible

    def _key_rows(self) -> tuple[list[Tensor], int, int]:
        """Returns the rows of the keys of each sequence, the number of keys, and that of rows."""
        N = self.k_seqinfo.seqstart_py[-1]
        return [torch.arange(*ends) for ends in self.k_seqinfo.intervals()], N, N


def check_same_number(q_info: SeqLenInfo, k_info: SeqLenInfo) -> None:
    B, others = (len(x.seqstart_py) - 1 for x in (q_info, k_info))
    if others != B:
        raise ValueError(f"kv_seqlen must have {B} lengths, as q_seqlen, got {others}")


def _lengths(name: str, lengths: Sequence[int], most: int | None = None) -> list[int]:
    if not isinstance(lengths, list | tuple):
        raise TypeError(f"{name} must be a list of ints, got {shown(lengths)}")
    for one in lengths:
        check_int(name, one, 0, (1 << 31) - 1 if most is None else most)
    return list(lengths)


def _vector(values: Sequence[int], device: Device) -> Tensor:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor(values, dtype=torch.int32, device=device)
