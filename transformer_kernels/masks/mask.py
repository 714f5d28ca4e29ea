"""The `Mask` class: the visible (query, key) pairs, as an intersection of constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from ..common.argument_checks import (
    LARGEST_INT,
    as_device,
    check_bool,
    check_int,
    check_tensor,
    shown,
)
from ..common.storage import check_storage
from . import unions, visualize
from .arguments import (
    extent_of,
    ids_of,
    integers,
    positions_of,
    range_of,
    size_of,
    vector,
    with_dimensions,
)
from .block_mask import check_block_mask, full_tiles, partial_tiles, visible_pairs
from .constraints import (
    Align,
    BlockSparse,
    Constraint,
    Dense,
    Intervals,
    KeyRange,
    Positions,
    Segments,
    Window,
    check_align,
)
from .selected import Selected, ascending

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.nn.attention.flex_attention import BlockMask

_CONSTRAINTS = get_args(Constraint)


@dataclass(frozen=True, eq=False)
class Mask:
    """Attention mask: an intersection of constraints on the visible (query, key) pairs.

    Build masks with the constructors below and combine them with `a & b`. `Mask()` makes every pair
    visible. Indices are b for batch entries, h for query heads, i for queries (0 to M - 1) and j
    for keys (0 to N - 1). A mask has no sizes of its own: each call resolves it against its sizes
    and checks it then.

    Examples:
        >>> mask = Mask.causal() & Mask.padding(key_lengths)
        >>> o = attention(q, k, v, mask=mask)
    """

    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.constraints, tuple):
            raise TypeError(f"constraints must be a tuple, got {shown(self.constraints)}")
        for one in self.constraints:
            if not isinstance(one, _CONSTRAINTS):
                raise TypeError(f"constraints must hold constraints, got {shown(one)}")

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
        check_align(align)
        return Mask((Window(extent_of("left", left), extent_of("right", right), align),))

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
        return Mask((KeyRange(None, vector("key_lengths", key_lengths)),))

    @staticmethod
    def key_range(start: Tensor, end: Tensor) -> Mask:
        """Key range: start[b] <= j < end[b] is visible, for example to mask left padding.

        Args:
            start: integers (B,), inclusive.
            end: integers (B,), exclusive. Keys and values outside the range may hold NaN.
        """
        return Mask((KeyRange(vector("start", start), vector("end", end)),))

    @staticmethod
    def segments(q_ids: Tensor, k_ids: Tensor | None = None, *, equal: bool = True) -> Mask:
        """Segment mask: q_ids[b, i] == k_ids[b, j] is visible, for documents packed into one row.

        Args:
            q_ids: integers (B, M), the segment id of each query.
            k_ids: integers (B, N), the segment id of each key. Default: q_ids.
            equal: with False, the pairs with different ids are visible: every token but itself, if
                ids are positions.
        """
        check_bool("equal", equal)
        k_ids = q_ids if k_ids is None else k_ids
        return Mask((Segments(ids_of("q_ids", q_ids), ids_of("k_ids", k_ids), equal),))

    @staticmethod
    def positions(
        q_pos: Tensor, k_pos: Tensor, left: int | None = None, right: int | None = 0
    ) -> Mask:
        """Position mask: q_pos[b, h, i] - left <= k_pos[b, h, j] <= q_pos[b, h, i] + right.

        A window by positions that the caller gives, for tokens that are not in the order of their
        positions: sorted, gathered, or spread over devices. The default is causal.

        Args:
            q_pos: integers (B or 1, M) or (B or 1, H or 1, M), the position of each query. At most
                2^62 - 1 in magnitude; others are clamped.
            k_pos: integers (B or 1, N) or (B or 1, H or 1, N), the position of each key. H counts
                query heads.
            left: visible positions before the query's; None is unbounded. May be negative.
            right: visible positions after the query's; None is unbounded. May be negative: -1 hides
                the query's own position.
        """
        q_pos, k_pos = positions_of("q_pos", q_pos), positions_of("k_pos", k_pos)
        return Mask((Positions(q_pos, k_pos, extent_of("left", left), extent_of("right", right)),))

    @staticmethod
    def intervals(
        low: Tensor | None, high: Tensor | None, k_pos: Tensor, *, inside: bool = True
    ) -> Mask:
        """Interval mask: low[b, h, i] <= k_pos[b, h, j] <= high[b, h, i] is visible.

        An interval of positions for each query. With `k_pos` = arange(N) these are keys from low to
        high. The named masks below are intersections of such.

        Args:
            low: integers (B or 1, M) or (B or 1, H or 1, M), the first visible position of each
                query. None is unbounded. At most 2^62 - 1 in magnitude; others are clamped.
            high: the last visible position, as `low`. A query with high < low sees no key.
            k_pos: integers (B or 1, N) or (B or 1, H or 1, N), the position of each key.
            inside: with False, all but the keys of the interval are visible.

        Raises:
            ValueError: low and high are None, or a shape differs.
        """
        check_bool("inside", inside)
        if low is None and high is None:
            raise ValueError("low or high must be a tensor, got None for both")
        low = None if low is None else positions_of("low", low)
        high = None if high is None else positions_of("high", high)
        return Mask((Intervals(low, high, positions_of("k_pos", k_pos), inside),))

    @staticmethod
    def prefix_lm(prefix_lengths: Tensor, length: int) -> Mask:
        """Prefix mask: j <= i or j < prefix_lengths[b] is visible: causal after a prefix.

        Args:
            prefix_lengths: integers (B,).
            length: number of queries and of keys. `sliced` gives the mask of the last queries.

        Source: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1.
        """
        prefix_lengths = vector("prefix_lengths", prefix_lengths)
        check_storage((("prefix_lengths", prefix_lengths),))
        return Mask(unions.prefix_lm(prefix_lengths, size_of("length", length)))

    @staticmethod
    def blocks(ids: Tensor) -> Mask:
        """Blockwise causal mask: j <= i, or j in the same block as i, is visible.

        A block is a run of tokens with the same id, at least 0: an image among text, or a step of
        a rollout. Tokens with negative ids are in no block.

        Args:
            ids: integers (B, length), the block of each query and key.
        """
        ids = ids_of("ids", ids)
        check_storage((("ids", ids),))
        return Mask(unions.blocks(ids))

    @staticmethod
    def shared_prefix(ids: Tensor) -> Mask:
        """Causal mask of continuations of one prefix: several answers to a prompt in one row.

        A token sees the tokens before it of its own run of equal ids, and those of the row's first
        run, the prefix.

        Args:
            ids: integers (B, length), for example 0 for the prefix, and the number of the answer.
        """
        ids = ids_of("ids", ids)
        check_storage((("ids", ids),))
        return Mask(unions.shared_prefix(ids))

    @staticmethod
    def global_window(
        length: int, tokens: int, window: int, *, device: torch.device | str | None = None
    ) -> Mask:
        """Window with global tokens: |i - j| <= window, i < tokens or j < tokens is visible.

        With `& Mask.causal()` it is a causal window with attention sinks.

        Args:
            length: number of queries and of keys.
            tokens: global tokens at the start, which see all tokens and are seen by all.
            window: visible keys on either side.
            device: device of the mask. Default: the CPU.

        Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1; Xiao et al. 2024,
        arXiv:2309.17453.
        """
        sizes = size_of("length", length), size_of("tokens", tokens), size_of("window", window)
        return Mask(unions.global_window(*sizes, device))

    @staticmethod
    def block_diffusion(
        length: int, block: int, *, device: torch.device | str | None = None
    ) -> Mask:
        """Training mask of block diffusion, for `length` noisy tokens and then as many clean ones.

        A noisy token sees the noisy tokens of its block and the clean ones of the blocks before it.
        A clean token sees the clean tokens of its block and of those before it.

        Args:
            length: number of noisy tokens, and of clean ones: M = N = 2 length.
            block: tokens of a block, at least 1. The last block may be shorter.
            device: device of the mask. Default: the CPU.

        Source: Arriola et al. 2025, arXiv:2503.09573.
        """
        sizes = size_of("length", length), size_of("block", block, 1)
        return Mask(unions.block_diffusion(*sizes, device))

    @staticmethod
    def dense(attn_mask: Tensor) -> Mask:
        """Dense mask: attn_mask[b, h, i, j] is visible.

        Args:
            attn_mask: bool tensor broadcastable to (B, H, M, N), any strides; True = visible.
        """
        check_tensor("attn_mask", attn_mask, (torch.bool,), wanted="a bool tensor")
        if attn_mask.dim() > 4:
            raise ValueError(
                f"attn_mask must broadcast to (B, H, M, N), got shape {tuple(attn_mask.shape)}"
            )
        return Mask((Dense(with_dimensions("attn_mask", attn_mask, 4)),))

    @staticmethod
    def block_sparse(blocks: Tensor, block_size: int) -> Mask:
        """Block-sparse mask: blocks[h, i // block_size, j // block_size] is visible.

        Args:
            blocks: bool (H or 1, ceil(M / block_size), ceil(N / block_size)), or without the first
                dimension. `transformer_kernels.masks.block_patterns` builds the usual patterns.
            block_size: queries and keys per block, at least 1.

        Source: Child et al. 2019, arXiv:1904.10509.
        """
        check_tensor("blocks", blocks, (torch.bool,), wanted="a bool tensor")
        if blocks.dim() not in (2, 3):
            raise ValueError(
                f"blocks must be (H or 1, rows, columns), got shape {tuple(blocks.shape)}"
            )
        check_int("block_size", block_size, 1)
        return Mask((BlockSparse(with_dimensions("blocks", blocks, 3), block_size),))

    @staticmethod
    def selected(indices: Tensor, block_size: int = 1) -> Mask:
        """Selected keys: j // block_size in indices[b, h, i] is visible, a list for each query.

        For sparse attention, whose keys or blocks of keys a model's indexer chooses. Memory is that
        of the lists. docs/masks.md states which calls gather the listed keys, and what they cost.

        Args:
            indices: integers (B or 1, M, count) or (B or 1, H or 1, M, count), in any order;
                negative ones select nothing. Lists that ascend without repetitions are not sorted.
            block_size: keys of a block, at least 1. With 1 the indices are keys.

        Raises:
            TypeError: indices is no tensor of integers.
            ValueError: a shape differs, or (for indices on a CPU) one is past the last block.

        Source: DeepSeek-AI 2025, DeepSeek-V3.2-Exp; Yuan et al. 2025, arXiv:2502.11089.
        """
        shapes = "(batch, queries, count)", "(batch, heads, queries, count)"
        indices = integers("indices", indices, *shapes)
        check_int("block_size", block_size, 1, (1 << 31) - 1)
        check_storage((("indices", indices),))
        indices = indices if indices.dim() == 4 else indices[:, None]
        return Mask((Selected(ascending(indices), block_size),))

    @staticmethod
    def from_block_mask(block_mask: BlockMask) -> Mask:
        """Converts the block mask of torch's FlexAttention.

        Full tiles are visible, partial tiles are evaluated by `mask_mod`, and the others are
        hidden. The result is block-sparse if all visible tiles are full and square and the batch
        entries share them. Otherwise it is dense, B x H x M x N bytes for the B and H of the block
        mask, which are 1 if its entries or heads share one mask.

        Args:
            block_mask: a `torch.nn.attention.flex_attention.BlockMask`, for M queries and N keys.

        Raises:
            TypeError: block_mask is of another type.

        Source: `torch.nn.attention.flex_attention.create_block_mask`.
        """
        check_block_mask(block_mask)
        partial, full = partial_tiles(block_mask), full_tiles(block_mask)
        rows, columns = block_mask.BLOCK_SIZE
        if rows == columns and full.shape[0] == 1 and not partial.any():
            return Mask.block_sparse(full[0], rows)
        return Mask.dense(visible_pairs(block_mask, partial, full))

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
            TypeError: a size is not an int.
            ValueError: a size is negative, or a tensor of the mask does not fit these sizes.
        """
        self.check(B, H, M, N)
        if B * H * M * N > LARGEST_INT:
            raise ValueError(f"B * H * M * N must fit in 64 bits, got {B} * {H} * {M} * {N}")
        target = as_device(device) if device is not None else self.device or torch.device("cpu")
        visible = torch.ones(B, H, M, N, dtype=torch.bool, device=target)
        for constraint in self.to(target).constraints:
            visible = visible & constraint.visible(M, N, target)
        return visible

    def sliced(
        self, rows: slice = slice(None), columns: slice = slice(None), *, M: int, N: int
    ) -> Mask:
        """Returns the mask of some of M queries and some of N keys, counted from the first of each.

        `mask.sliced(rows, columns, M=M, N=N).materialize(B, H, m, n)` equals
        `mask.materialize(B, H, M, N)[..., rows, columns]`, for m queries and n keys. Nothing of
        that size is made; tensors by token are views.

        Args:
            rows: the queries, a slice with step 1. Default: all.
            columns: the keys, a slice with step 1. Default: all.
            M: queries of this mask.
            N: keys of this mask.

        Raises:
            TypeError: rows or columns is not a slice, or a size is not an int.
            ValueError: a step is not 1, a size is negative, or a tensor of the mask does not fit
                the sizes.
        """
        self.check(*self._extents(), M, N)
        parts = range_of("rows", rows, M), range_of("columns", columns, N)
        return Mask(tuple(one.part(*parts, M, N) for one in self.constraints))

    def check(self, B: int, H: int, M: int, N: int) -> None:
        """Raises ValueError if a tensor of the mask does not fit these sizes, or has no memory."""
        for name, size in (("B", B), ("H", H), ("M", M), ("N", N)):
            check_int(name, size, 0)
        check_storage((f"the mask's {name}", x) for name, x in self.tensors())
        for constraint in self.constraints:
            constraint.check(B, H, M, N)

    def to(self, device: torch.device | str) -> Mask:
        """Returns the same mask with its tensors on `device`."""
        target = as_device(device)
        return Mask(tuple(_to_device(constraint, target) for constraint in self.constraints))

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
        """The (M, N) slice of one batch entry and head, on the CPU."""
        check_int("batch", batch, 0)
        check_int("head", head, 0)
        B, H = self._extents()
        if B == 0 or H == 0:
            raise ValueError(f"the mask must have a batch entry and a head, got B = {B}, H = {H}")
        return self.materialize(B, H, M, N, "cpu")[min(batch, B - 1), min(head, H - 1)]

    def _extents(self) -> tuple[int, int]:
        """The largest sizes of the mask's tensors in the dimensions B and H."""
        extents = [constraint.extent() for constraint in self.constraints]
        return max([b for b, _ in extents], default=1), max([h for _, h in extents], default=1)


def _to_device(constraint: Constraint, device: torch.device) -> Constraint:
    for name, x in constraint.tensors().items():
        if x.device.type == "meta" and device.type != "meta":
            raise ValueError(f"the mask's {name} is on meta: it has no values to copy to {device}")
    fields: dict[str, Any] = {name: x.to(device) for name, x in constraint.tensors().items()}
    return replace(constraint, **fields)
