"""Structure of HuggingFace's mask functions: the `Mask` that a nest of closures stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import getclosurevars
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...masks.mask import Mask

MaskFunction = Callable[..., Any]


class Grid(NamedTuple):
    """Queries and keys of one call: B, M, N, and the positions of the first query and key."""

    B: int
    M: int
    N: int
    q_offset: int | Tensor
    """With a tensor, which a static cache has, the host does not know the positions."""
    kv_offset: int
    device: torch.device

    @property
    def is_square(self) -> bool:
        """The queries are known to be all tokens, in order: nothing is cached."""
        return (
            self.M == self.N and isinstance(self.q_offset, int) and self.q_offset == self.kv_offset
        )

    @property
    def is_static_step(self) -> bool:
        """A single query with a static cache.

        The masks of all such steps have the same constraints, so that compiled code is reused.
        """
        return self.M == 1 and isinstance(self.q_offset, Tensor)

    def window(self, left: int | None, right: int | None) -> Mask:
        """Visible: q - left <= k <= q + right, of positions q and k."""
        shift = self.q_offset - self.kv_offset
        if isinstance(shift, int):
            low = None if left is None else shift - left
            high = None if right is None else shift + right
            return self._diagonals(low, high)
        if self.is_static_step:
            return self._key_range(shift, left, right)
        q_pos = torch.arange(self.M, device=self.device) + shift
        k_pos = torch.arange(self.N, device=self.device)
        return Mask.positions(q_pos[None], k_pos[None], left, right)

    def _diagonals(self, low: int | None, high: int | None) -> Mask:
        """Visible: i + low <= j <= i + high. A bound that hides nothing is left out."""
        if low is not None and low <= 1 - self.M:
            low = None
        if high is not None and high >= self.N - 1:
            high = None
        if low is None and high is None:
            return Mask()
        return Mask.window(None if low is None else -low, high)

    def _key_range(self, q_pos: Tensor, left: int | None, right: int | None) -> Mask:
        """The window of a single query."""
        end = torch.full_like(q_pos, self.N) if right is None else q_pos + right + 1
        start = torch.zeros_like(q_pos) if left is None else q_pos - left
        return Mask.key_range(start.reshape(1).expand(self.B), end.reshape(1).expand(self.B))

    def chunks(self, size: int, start: Tensor) -> Mask:
        """Visible: (q - start[b]) // size == (k - start[b]) // size, of positions q and k."""
        q_pos = torch.arange(self.M, device=self.device) + self.q_offset
        k_pos = torch.arange(self.N, device=self.device) + self.kv_offset
        ids = [(positions - start.to(self.device)[:, None]) // size for positions in (q_pos, k_pos)]
        return Mask.segments(*ids)


class Structure(NamedTuple):
    """The mask of a mask function."""

    mask: Mask
    is_packed: bool = False
    """Packed documents are separated."""


Variables = Mapping[str, Any]
Readers = Mapping[CodeType, "Reader"]
Reader = Callable[[Variables, Grid, Readers], Structure | None]
"""The structure of a closure, from its variables."""


def structure_of(function: MaskFunction, grid: Grid) -> Structure | None:
    """Returns the structure of a function from `transformers.masking_utils`; None of any other."""
    return _read(function, grid, recognised())


def _read(function: MaskFunction, grid: Grid, readers: Readers) -> Structure | None:
    reader = readers.get(getattr(function, "__code__", None))  # type: ignore[arg-type]
    if reader is None:
        return None
    return reader(getclosurevars(function).nonlocals, grid, readers)


@cache
def recognised() -> Readers:
    """Maps the code of each mask function that is understood to its reader.

    The closures of one factory share their code. Each reader is compared with an example, so that a
    release of transformers that defines a function differently gets dense masks, not wrong ones.
    """
    from transformers import masking_utils

    found: dict[CodeType, Reader] = {}
    for reader, example in _EXAMPLES.items():
        try:
            function = example(masking_utils)
            readers = found | {function.__code__: reader}
            if _agrees(function, readers):
                found = readers
        except (AttributeError, KeyError, TypeError):  # another name, variable or signature
            continue
    return found


def _agrees(function: MaskFunction, readers: Readers) -> bool:
    B, length = 2, 7
    index = torch.arange(length, device="cpu")
    structure = _read(function, Grid(B, length, length, 0, 0, index.device), readers)
    batch, head = index[:B, None, None], index.new_zeros(())
    visible = function(batch, head, index[:, None], index).expand(B, -1, length)
    return structure is not None and torch.equal(
        structure.mask.materialize(B, 1, length, length)[:, 0], visible
    )


def _causal(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(grid.window(None, 0))


def _bidirectional(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(Mask())


def _sliding(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(grid.window(variables["sliding_window"] - 1, None))


def _sliding_both_ways(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    size = variables["sliding_window"]
    return Structure(grid.window(size, size))


def _chunks(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(grid.chunks(variables["chunk_size"], variables["left_padding"]))


def _packed(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(Mask.segments(variables["packed_sequence_mask"]), is_packed=True)


def _by_position(variables: Variables, grid: Grid, readers: Readers) -> Structure | None:
    """A mask by positions within documents.

    It stands next to `_packed`. Within a document positions increase by one, so that a window by
    position is the window by index.
    """
    structure = _read(variables["mask_function"], grid, readers)
    if structure is None or structure.mask.tensors():
        return None
    return structure


def _all(variables: Variables, grid: Grid, readers: Readers) -> Structure | None:
    mask, is_packed = Mask(), False
    for function in variables["mask_functions"]:
        structure = _read(function, grid, readers)
        if structure is None:
            return None
        mask, is_packed = mask & structure.mask, is_packed or structure.is_packed
    return Structure(mask, is_packed)


def _example(*rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, device="cpu")


_EXAMPLES: dict[Reader, Callable[[Any], MaskFunction]] = {
    _causal: lambda library: library.causal_mask_function,
    _bidirectional: lambda library: library.bidirectional_mask_function,
    _sliding: lambda library: library.sliding_window_overlay(3),
    _sliding_both_ways: lambda library: library.sliding_window_bidirectional_overlay(3),
    _chunks: lambda library: library.chunked_overlay(3, _example([0, 2])[0]),
    _packed: lambda library: library.packed_sequence_mask_function(
        _example([0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2])
    ),
    _by_position: lambda library: library.remap_positions_for_packed_sequence(
        library.causal_mask_function, _example(range(7), range(7))
    ),
    _all: lambda library: library.and_masks(
        library.causal_mask_function, library.sliding_window_overlay(3)
    ),
}
"""A mask function for each reader, for two rows of seven tokens."""
