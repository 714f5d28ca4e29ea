"""Decoding by the ways to keep keys and values. Each gets a copy of them, so that none finds what
another has brought into the processor's caches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.runner.gpu_check import why_refused
from benchmarks.runner.measure import Contender
from transformer_kernels import attention, attention_decode
from transformer_kernels.bench import Attend, Case, Variant, prepare_work
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.bench.variants import naive_attention

PAGE_SIZES = (64, 16)
NONE, IN_ORDER = "caches: none", "caches: in order"

ENTRIES = (0, -1)
"""Of the batch, those that are checked: float64 copies of all would not fit on a GPU"""


class CacheContenders:
    """Those of one case, found right as they are made."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.inputs = case.inputs()
        q, k, v = (x[list(ENTRIES)] for x in self.inputs[:3])
        self._exact = naive_attention(q.double(), k.double(), v.double(), None)
        self._plain = naive_attention(q, k, v, None)

    def ours(self, variant: str, backend: str) -> list[Contender]:
        """By the names of the caches; `variant` is what the rows call the backend."""
        attends = cache_attends(*self.inputs[1:3], backend)
        return [self._checked(name, variant, attend) for name, attend in attends.items()]

    def peers(self, variants: Iterable[Variant]) -> tuple[list[Contender], dict[str, str]]:
        """Those that can, which know no cache; and why others cannot."""
        contenders: list[Contender] = []
        left_out: dict[str, str] = {}
        for variant in variants:

            def attempt(variant: Variant = variant) -> None:
                attend = variant.bind(self._case)
                contenders.append(self._checked(NONE, variant.name, attend))

            reason = why_refused(attempt)
            if reason is not None:
                left_out[variant.name] = reason
        return contenders, left_out

    def copy(self) -> Contender:
        """Of the keys: as many bytes are read and written as decoding reads of keys and values."""
        k = self.inputs.k
        target = torch.empty_like(k)
        return Contender(
            case=replace(self._case, name=IN_ORDER), direction="fwd", variant="copy",
            prepare=lambda: lambda: target.copy_(k), error=math.nan,
        )  # fmt: skip

    def _checked(self, name: str, variant: str, attend: Attend) -> Contender:
        with torch.no_grad():
            o = attend(*self.inputs[:3])[list(ENTRIES)]
        assert_within_rule(f"{variant}, {name}: o", o, self._exact, self._plain)
        error = (o.double() - self._exact).abs().max() / self._exact.abs().max()
        return Contender(
            case=replace(self._case, name=name), direction="fwd", variant=variant,
            prepare=prepare_work(attend, self.inputs, "fwd"), error=float(error),
        )  # fmt: skip


def cache_attends(k: Tensor, v: Tensor, backend: str) -> dict[str, Attend]:
    """By the names of their cases; they attend to their copies of k and v (B, H_kv, N, width)."""
    B, _, N, _ = k.shape
    lengths = torch.full((B,), N, dtype=torch.int32, device=k.device)
    attends = {NONE: _plain(k.clone(), v.clone(), backend)}
    attends[IN_ORDER] = _cached(k.clone(), v.clone(), lengths, None, backend)
    for size in PAGE_SIZES:
        table = torch.randperm(B * (N // size), generator=torch.Generator().manual_seed(1))
        table = table.reshape(B, -1).int().to(k.device)
        pages = in_pages(k, table), in_pages(v, table)
        attends[f"caches: pages of {size}"] = _cached(*pages, lengths, table, backend)
    return attends


def in_pages(x: Tensor, table: Tensor) -> Tensor:
    """x (B, H, N, width) in the pages that the table (B, N // page_size) names, all there are."""
    B, H, N, width = x.shape
    page_size = N // table.shape[1]
    pages = x.new_empty(table.numel(), H, page_size, width)
    pages[table.long()] = x.reshape(B, H, -1, page_size, width).transpose(1, 2)
    return pages


def _plain(k: Tensor, v: Tensor, backend: str) -> Attend:
    return lambda q, *_: attention(q, k, v, backend=backend)


def _cached(k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, backend: str) -> Attend:
    return lambda q, *_: attention_decode(q, k, v, lengths, table, backend=backend)
