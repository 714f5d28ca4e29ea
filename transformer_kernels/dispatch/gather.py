"""Selected keys by gathering: each query becomes a sequence, its list the block table of a cache.

The kernels of decoding then read the listed keys alone, in place. They have no backward pass, and
count positions within a list: other calls run as calls with an element mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import BACKENDS
from ..backends.base import FusedBackend
from ..backends.schema import empty_like_layout
from ..common.argument_checks import values_are_readable
from ..common.torch_private import functorch_is_active
from ..masks.resolved import BLOCK_MASK_SIZE, ResolvedMask
from ..masks.selected import Selected
from ..problem import Layout, Problem, shape_of
from .autograd import needs_reference
from .choose import Explanation

_ENTRIES = 1 << 20
"""Entries of lists in one call, which limits its memory."""
_CALL = 80_000.0
"""Nanoseconds of Python for one call."""


class Part(NamedTuple):
    """One call of a kernel: some rows of the heads of one batch entry that share lists."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    b: int
    heads: slice
    rows: slice


class Gathering(NamedTuple):
    """How a call gathers the listed keys."""

    backend: FusedBackend
    first: Part
    others: Iterator[Part]

    def explained(self, call: Explanation) -> Explanation:
        """Explains the call, given its explanation without gathering."""
        name, (part, *qkv) = self.backend.name, self.first[:4]
        kernel = f"gathers the selected keys: {self.backend.kernel(part, *qkv)}"
        return replace(call, chosen=name, kernel=kernel, reasons=call.reasons | {name: ()})

    def run(self, problem: Problem, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (o, lse) of the whole call; once."""
        o = empty_like_layout(q, v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=problem.shape.accumulate_dtype)
        is_traced = torch.compiler.is_compiling()
        for part in itertools.chain((self.first,), self.others):
            one = self.backend.forward(
                part.problem, part.q, part.k, part.v, differentiable=is_traced
            )
            o[part.b, part.heads, part.rows] = one.o[:, :, 0].transpose(0, 1)
            lse[part.b, part.heads, part.rows] = one.row_stats[0, :, :, 0].T
        return o, lse


def gathering(problem: Problem, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Gathering | None:
    """Returns how a call gathers its keys; None if it runs with a mask instead."""
    mask = problem.mask
    if mask.selected is None or problem.shape.B * problem.shape.M == 0:
        return None
    if not (mask.q_low is mask.dense is mask.blocks is None):
        return None
    if any(isinstance(option, Tensor) for option in problem.scores):  # by position, or dropout
        return None
    tensors = q, k, v
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    if functorch_is_active() or needs_reference(tensors):
        return None
    if not (_is_cheaper(problem) and _share_lists(mask.selected, problem.shape.H_kv)):
        return None
    others = _parts(problem, q, k, v)
    first = next(others)
    for one in BACKENDS:
        fits = backend in ("auto", one.name) and not one.unsupported_reasons(first.problem)
        if fits and isinstance(one, FusedBackend):
            return Gathering(one, first, others)
    return None


def _parts(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Part]:
    """Divides a call into calls with a cache, whose sequences are the queries."""
    shape, mask = problem.shape, problem.mask
    assert mask.selected is not None
    lists, size = mask.selected, mask.selected_size
    page_size = math.gcd(size, shape.N)  # pages are views of k and v
    pages = shape.N // page_size
    k, v = (x.unflatten(2, (pages, page_size)).transpose(1, 2) for x in (k, v))
    groups = 1 if lists.shape[1] == 1 else shape.H_kv
    of_q, of_k = shape.H_q // groups, shape.H_kv // groups
    step = max(1, _ENTRIES // (lists.shape[3] * size // page_size))
    for b in range(shape.B):
        for group in range(groups):
            heads, k_heads = (slice(group * n, (group + 1) * n) for n in (of_q, of_k))
            shared = lists[b if lists.shape[0] > 1 else 0, heads.start if groups > 1 else 0]
            for first in range(0, shape.M, step):
                rows = slice(first, min(first + step, shape.M))
                own = Selected(shared[rows], size).refined(page_size).indices
                first_place, end_place = _places(problem, own, page_size, b, rows)
                layout = Layout(cache_seqlens=end_place.int(), block_table=own.clamp(0, pages - 1))
                one = q[b, heads, rows].transpose(0, 1).unsqueeze(2)
                of_cache = k[b][:, k_heads], v[b][:, k_heads]
                part_shape = shape_of(one, *of_cache, layout)
                visible = ResolvedMask(key_start=first_place)
                part = Problem(part_shape, visible, problem.scores, layout)
                yield Part(part, one, *of_cache, b, heads, rows)


def _places(
    problem: Problem, lists: Tensor, size: int, b: int, rows: slice
) -> tuple[Tensor, Tensor]:
    """Returns the first place of a visible key in each list (rows, count), and that after the last.

    They count the listed keys that precede the first visible key, and the end of the visible ones.
    """
    mask, N = problem.mask, problem.shape.N
    i = torch.arange(rows.start, rows.stop, device=lists.device)
    if mask.bottom_right:
        i = i + (N - problem.shape.M)
    begin, end = (i + mask.diagonal_low).clamp(min=0), (i + mask.diagonal_high + 1).clamp(max=N)
    if mask.key_start is not None:
        begin = torch.maximum(begin, mask.key_start[b])
    if mask.key_end is not None:
        end = torch.minimum(end, mask.key_end[b])
    first = lists.long() * size
    begin, end = ((x[:, None] - first).clamp(0, size).sum(dim=1) for x in (begin, end))
    return begin, end


def _is_cheaper(problem: Problem) -> bool:
    """True if reading listed keys costs less than attention with an element mask.

    CPU: nanoseconds of two threads. A listed row of k and v costs a miss of the caches, or in pages
    a row in order, or the products of its query heads. With an element mask, each key of the blocks
    that a list of the query block touches costs a row in order, once for all queries, or the
    products of all queries.
    """
    shape, mask = problem.shape, problem.mask
    assert mask.selected is not None
    shift = shape.N - shape.M if mask.bottom_right else 0

    def visible(i: int) -> int:
        begin = max(i + shift + mask.diagonal_low, 0)
        return max(min(i + shift + mask.diagonal_high + 1, shape.N) - begin, 0)

    keys = (visible(0) + visible(shape.M - 1)) // 2
    listed = mask.selected.shape[3] * mask.selected_size
    if shape.device.type != "cpu":  # not measured: fewer rows are read
        return 2 * shape.M * listed <= keys
    blocks = listed * max(1, BLOCK_MASK_SIZE // mask.selected_size)
    keys = min(keys, blocks * min(shape.M, BLOCK_MASK_SIZE))
    calls = 1 if mask.selected.shape[1] == 1 else shape.H_kv
    group = shape.H_q // shape.H_kv
    row = 12.0 if math.gcd(mask.selected_size, shape.N) >= 16 else 40.0
    gathered = shape.H_kv * shape.M * listed * max(row, 3.0 * group) + calls * _CALL
    return gathered <= shape.H_kv * keys * max(12.0, 1.5 * group * shape.M)


def _share_lists(lists: Tensor, H_kv: int) -> bool:
    """True if the query heads of each key head have the same lists."""
    heads = lists.shape[1]
    if heads in (1, H_kv):
        return True
    if not values_are_readable(lists):
        return False
    by_group = lists.unflatten(1, (H_kv, -1))
    return bool((by_group == by_group[:, :, :1]).all())
