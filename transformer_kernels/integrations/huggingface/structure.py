"""Structure of HuggingFace's mask functions: the `Mask` that a nest of closures stands for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dis import get_instructions
from functools import cache
from inspect import getclosurevars
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...masks.mask import Mask
from ...masks.unions import runs

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
        return Mask.positions(self._q_pos()[None], self._k_pos()[None], left, right)

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
        start = start.to(self.device)[:, None]
        return Mask.segments((self._q_pos() - start) // size, (self._k_pos() - start) // size)

    def blocks(self, ids: Tensor, left: int | None, right: int | None) -> Mask | None:
        """Visible: q - left <= k <= q + right or ids[b, q] == ids[b, k] >= 0, of positions q and k.

        None if that needs memory for pairs: a block is not contiguous, and the window has a left
        side or a row has several blocks. The host waits for the ids.

        Args:
            ids: integers (B, length): the block of each position.
            left: positions before q, at least 0; None is unbounded.
            right: positions after q, at least 0; None is unbounded.
        """
        ids, length = ids.to(self.device), ids.shape[1]
        if max(self.M, self.N) > length:  # a shard of a divided sequence
            return None
        q_pos, k_pos = self._q_pos(), self._k_pos()
        low = torch.zeros_like(q_pos) if left is None else q_pos - left
        high = torch.full_like(q_pos, length) if right is None else q_pos + right
        in_block = ids[:, q_pos] >= 0
        if not in_block.any():
            return self.window(left, right)
        if _are_contiguous(ids):
            start, end = (x[:, q_pos] for x in runs(ids))
            low = torch.where(in_block, torch.minimum(start, low), low)
            high = torch.where(in_block, torch.maximum(end, high), high)
        elif left is None and bool(((ids < 0) | (ids == ids.amax(1, keepdim=True))).all()):
            # The block's keys, from the last to the first, are left of all others.
            k_pos = torch.where(ids[:, k_pos] >= 0, -1 - k_pos, k_pos)
            return Mask.intervals(torch.where(in_block, -length, -1 - high), high[None], k_pos)
        else:
            return None
        if self.M == 1:
            return Mask.key_range(low[:, 0] - self.kv_offset, high[:, 0] + 1 - self.kv_offset)
        return Mask.intervals(low, high, k_pos[None])

    def _q_pos(self) -> Tensor:
        return torch.arange(self.M, device=self.device) + self.q_offset

    def _k_pos(self) -> Tensor:
        return torch.arange(self.N, device=self.device) + self.kv_offset


def _are_contiguous(ids: Tensor) -> bool:
    """Tells whether the tokens of each block, with one id of at least 0, follow each other."""
    starts, _ = runs(ids)
    index = torch.arange(ids.shape[1], device=ids.device)
    ordered = ids.sort(1).values
    changes = functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    blocks = (changes & (ordered >= 0)).sum(1)
    return bool((((starts == index) & (ids >= 0)).sum(1) == blocks).all())


class Structure(NamedTuple):
    """The mask of a mask function: a window by position, and further constraints."""

    left: int | None = None
    right: int | None = None
    others: Mask = Mask()
    is_packed: bool = False
    """Packed documents are separated."""

    def mask(self, grid: Grid) -> Mask:
        if self.left is None and self.right is None:
            return self.others
        return grid.window(self.left, self.right) & self.others


Variables = Mapping[str, Any]
Readers = Mapping[CodeType, "Reader"]
Reader = Callable[[Variables, Grid, Readers], Structure | None]
"""The structure of a closure, from its variables."""


def structure_of(function: MaskFunction, grid: Grid) -> Structure | None:
    """Returns the structure of a function from `transformers.masking_utils`; None of any other."""
    return _read(function, grid, recognised())


def _read(function: MaskFunction, grid: Grid, readers: Readers) -> Structure | None:
    reader = _reader(function, readers)
    return None if reader is None else reader(getclosurevars(function).nonlocals, grid, readers)


def _reader(function: MaskFunction, readers: Readers) -> Reader | None:
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return None
    if code in readers:
        return readers[code]
    if _is_constant(function):
        return _bidirectional if bool(function(0, 0, 0, 0)) else None
    return _overlays_of(function.__module__).get(code)


def _is_constant(function: MaskFunction) -> bool:
    """Tells whether the function uses neither arguments nor variables, as `lambda *args:
    torch.tensor(True)`, which models of bidirectional attention have."""
    code = function.__code__
    reads = any(
        one.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) for one in get_instructions(code)
    )
    names = set(code.co_names) <= {"torch", "tensor", "bool"}
    return names and not reads and function.__globals__.get("torch", torch) is torch


@cache
def _overlays_of(module: str) -> Readers:
    """Returns the reader of the overlay that some models define: a window on both sides."""
    factory = getattr(sys.modules.get(module), "_bidirectional_window_overlay", None)
    if factory is None or not module.startswith("transformers.models."):
        return {}
    example = factory(3)
    readers: Readers = {example.__code__: _within_window}
    return readers if _agrees(example, readers) else {}


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
    grid = Grid(B, length, length, 0, 0, index.device)
    structure = _read(function, grid, readers)
    batch, head = index[:B, None, None], index.new_zeros(())
    visible = function(batch, head, index[:, None], index).expand(B, -1, length)
    return structure is not None and torch.equal(
        structure.mask(grid).materialize(B, 1, length, length)[:, 0], visible
    )


def _causal(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(right=0)


def _bidirectional(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure()


def _sliding(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(left=variables["sliding_window"] - 1)


def _sliding_both_ways(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    size = variables["sliding_window"]
    return Structure(size, size)


def _within_window(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    size = variables["sliding_window"]
    return Structure(size - 1, size - 1)


def _chunks(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(others=grid.chunks(variables["chunk_size"], variables["left_padding"]))


def _packed(variables: Variables, grid: Grid, readers: Readers) -> Structure:
    return Structure(others=Mask.segments(variables["packed_sequence_mask"]), is_packed=True)


def _by_position(variables: Variables, grid: Grid, readers: Readers) -> Structure | None:
    """A mask by positions within documents.

    It stands next to `_packed`. Within a document positions increase by one, so that a window by
    position is the window by index.
    """
    structure = _read(variables["mask_function"], grid, readers)
    return None if structure is None or structure.others.constraints else structure


def _all(variables: Variables, grid: Grid, readers: Readers) -> Structure | None:
    found = Structure()
    for function in variables["mask_functions"]:
        one = _read(function, grid, readers)
        if one is None:
            return None
        found = Structure(
            _smaller(found.left, one.left), _smaller(found.right, one.right),
            found.others & one.others, found.is_packed or one.is_packed,
        )  # fmt: skip
    return found


def _smaller(a: int | None, b: int | None) -> int | None:
    """Returns the smaller side of two windows; None is unbounded."""
    return b if a is None else a if b is None else min(a, b)


def _any(variables: Variables, grid: Grid, readers: Readers) -> Structure | None:
    """A union of windows, each of which shows the query's own position, and perhaps of blocks."""
    ids: list[Tensor] = []
    windows: list[Structure] = []
    for function in variables["mask_functions"]:
        if _reader(function, readers) is _blocks:
            ids.append(getclosurevars(function).nonlocals["block_sequence_ids"])
            continue
        one = _read(function, grid, readers)
        if one is None or one.others.constraints:
            return None
        windows.append(one)
    if not windows:
        return None
    left, right = _largest([one.left for one in windows]), _largest([one.right for one in windows])
    if not ids or left is right is None:
        return Structure(left, right)
    mask = grid.blocks(ids[0], left, right) if len(ids) == 1 else None
    return None if mask is None else Structure(others=mask)


def _largest(sides: Sequence[int | None]) -> int | None:
    """Returns the largest side of windows; None is unbounded."""
    known = [side for side in sides if side is not None]
    return max(known) if len(known) == len(sides) else None


def _blocks(variables: Variables, grid: Grid, readers: Readers) -> Structure | None:
    """Blocks alone. `_any` reads those next to windows."""
    ids = variables["block_sequence_ids"]
    if not grid.is_square or ids.shape != (grid.B, grid.M):
        return None
    ids = ids.to(grid.device)
    return Structure(others=Mask.segments(ids.clamp(min=-1), ids.masked_fill(ids < 0, -2)))


def _example(*rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, device="cpu")


_BLOCKS = _example([-1, 0, 0, 0, -1, 1, 1], [0, 0, -1, 2, 2, 2, -1])
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
    _blocks: lambda library: library.blockwise_overlay(_BLOCKS),
    _any: lambda library: library.or_masks(
        library.causal_mask_function, library.blockwise_overlay(_BLOCKS)
    ),
}
"""A mask function for each reader, for two rows of seven tokens."""
