"""Decoding from contiguous and paged key-value caches.

Each variant gets its own copy of the keys and values, so that none benefits from data that another
has loaded into the processor's caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from transformer_kernels import attention, attention_decode, quantize_cache
from transformer_kernels.bench import Attend, Case, Variant, prepare_work
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.bench.trial import failure_reason
from transformer_kernels.bench.variants import naive_attention

PAGE_SIZES = (64, 16)
NONE, IN_ORDER, INT8 = "caches: none", "caches: in order", "caches: int8"

CHECKED_ENTRIES = (0, -1)
"""Batch entries that are checked: float64 copies of all would not fit on a GPU."""


class Caches:
    """Contenders of one case; each is checked when it is created."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.inputs = case.inputs()
        self._expected = self._results(*self.inputs[1:3])

    def ours(self, variant: str, backend: str) -> list[Contender]:
        """Returns one contender per cache layout; `variant` is the name in recorded rows."""
        attends = cache_attends(*self.inputs[1:3], backend)
        return [self._checked(name, variant, attend) for name, attend in attends.items()]

    def int8(self, variant: str, backend: str) -> Contender:
        """Returns the contender with a cache in int8, whose rounding is not counted as an error."""
        _, k, v, *_ = self.inputs
        cache = quantize_cache(k, v)
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        decode = partial(attention_decode, backend=backend, **scales)
        lengths = torch.full((k.shape[0],), k.shape[2], dtype=torch.int32, device=k.device)
        rounded = (cache.k * cache.k_scale[..., None], cache.v * cache.v_scale[..., None])
        attend = _on(decode, cache.k, cache.v, lengths)
        return self._checked(INT8, variant, attend, self._results(*rounded))

    def peers(self, variants: Iterable[Variant]) -> tuple[list[Contender], dict[str, str]]:
        """Returns the peers that can run the case (uncached), and the reasons of the others."""
        contenders: list[Contender] = []
        skipped: dict[str, str] = {}
        for variant in variants:

            def attempt(variant: Variant = variant) -> None:
                attend = variant.attend_for(self._case)
                contenders.append(self._checked(NONE, variant.name, attend))

            if (reason := failure_reason(attempt)) is not None:
                skipped[variant.name] = reason
        return contenders, skipped

    def copy(self) -> Contender:
        """Returns a copy of the keys, which moves as many bytes as decoding reads."""
        k = self.inputs.k
        target = torch.empty_like(k)
        case = replace(self._case, name=IN_ORDER)
        return Contender(case, "fwd", "copy", lambda: lambda: target.copy_(k), math.nan)

    def _results(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns o in float64 and by plain torch, of the entries that are checked."""
        q, k, v = (x[list(CHECKED_ENTRIES)] for x in (self.inputs.q, k, v))
        exact = naive_attention(q.double(), k.double(), v.double(), None)
        return exact, naive_attention(q, k.to(q.dtype), v.to(q.dtype), None)

    def _checked(
        self,
        name: str,
        variant: str,
        attend: Attend,
        expected: tuple[Tensor, Tensor] | None = None,
    ) -> Contender:
        exact, plain = expected or self._expected
        with torch.no_grad():
            o = attend(*self.inputs[:3])[list(CHECKED_ENTRIES)]
        assert_within_rule(f"{variant}, {name}: o", o, exact, plain)
        error = (o.double() - exact).abs().max() / exact.abs().max()
        case, prepare = replace(self._case, name=name), prepare_work(attend, self.inputs, "fwd")
        return Contender(case, "fwd", variant, prepare, float(error))


def cache_attends(k: Tensor, v: Tensor, backend: str) -> dict[str, Attend]:
    """Returns decoding functions by case name, each with its own copy of k and v."""
    B, _, N, _ = k.shape
    lengths = torch.full((B,), N, dtype=torch.int32, device=k.device)
    plain = partial(attention, backend=backend)
    decode = partial(attention_decode, backend=backend)
    attends = {NONE: _on(plain, k.clone(), v.clone())}
    attends[IN_ORDER] = _on(decode, k.clone(), v.clone(), lengths)
    for size in PAGE_SIZES:
        table = torch.randperm(B * (N // size), generator=torch.Generator().manual_seed(1))
        table = table.reshape(B, -1).int().to(k.device)
        pages = in_pages(k, table), in_pages(v, table)
        attends[f"caches: pages of {size}"] = _on(decode, *pages, lengths, table)
    return attends


def _on(attend: Callable[..., Tensor], *of: Tensor) -> Attend:
    """Returns the function of q alone; its other arguments are given."""
    return lambda q, *_: attend(q, *of)


def in_pages(x: Tensor, table: Tensor) -> Tensor:
    """Returns x (B, H, N, width) as pages (B * N / page_size, H, page_size, width).

    `table` (B, N / page_size) lists the pages of each batch entry and names every page once.
    """
    B, H, N, width = x.shape
    page_size = N // table.shape[1]
    pages = x.new_empty(table.numel(), H, page_size, width)
    pages[table.long()] = x.reshape(B, H, -1, page_size, width).transpose(1, 2)
    return pages
