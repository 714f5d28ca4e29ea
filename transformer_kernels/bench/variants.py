"""Who is measured: naive attention, torch's, and each of our fused backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from transformer_kernels import ops, philox
from transformer_kernels.api import attention
from transformer_kernels.bench.cases import SEED, Case
from transformer_kernels.mask import Mask

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v -> o"""


@dataclass(frozen=True)
class Variant:
    """A way to compute attention. `bind` does what a user does once, such as making the mask."""

    name: str
    label: str
    """For tables and pictures"""
    bind: Callable[[Case], Attend]
    why_unavailable: Callable[[], str | None] = lambda: None


def _naive(case: Case) -> Attend:
    shown = _bool_mask(case)
    hidden = None if shown is None else ~shown
    factor = _dropout_factor(case) if case.dropout_p else None
    return lambda q, k, v: naive_attention(q, k, v, hidden, bias=case.bias, factor=factor)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    *,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Attention as models write it out by hand, with no line more than it needs.

    Everything is rounded to q's dtype; a row with no visible key gives NaN. `factor` multiplies the
    weights, as dropout does.
    """
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = torch.matmul(q, k.mT) * q.shape[-1] ** -0.5
    if bias is not None:
        s = s + bias
    if hidden is not None:
        s = s.masked_fill(hidden, float("-inf"))
    p = s.softmax(dim=-1)
    if factor is not None:
        p = p * factor
    return torch.matmul(p, v)


def _dropout_factor(case: Case) -> Tensor:
    """(B, H_q, M, N), of our own bits: torch's would not give comparable results."""
    kept = philox.keep_mask(torch.tensor(SEED), case.B, case.H_q, case.M, case.N, case.dropout_p)
    return (kept / (1.0 - case.dropout_p)).to(case.dtype)


def _sdpa(case: Case) -> Attend:
    if case.bias is not None or case.dropout_p:
        raise ValueError(f"torch's SDPA is not measured with bias or dropout, got {case.name!r}")
    if case.mask is not None and case.mask.constraints == Mask.causal().constraints:
        return lambda q, k, v: _torch_sdpa(q, k, v, is_causal=True)
    shown = _bool_mask(case)
    return lambda q, k, v: _torch_sdpa(q, k, v, attn_mask=shown)


def _torch_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=grouped
    )


def ours(backend: str) -> Callable[[Case], Attend]:
    """`Variant.bind` of one of our backends."""

    def bind(case: Case) -> Attend:
        seed = SEED if case.dropout_p else None
        return lambda q, k, v: attention(
            q, k, v,
            mask=case.mask, bias=case.bias, dropout_p=case.dropout_p, seed=seed, backend=backend,
        )  # fmt: skip

    return bind


def _bool_mask(case: Case) -> Tensor | None:
    """(B, 1, M, N); made once, so that nobody's time includes it."""
    return None if case.mask is None else case.mask.materialize(case.B, 1, case.M, case.N)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("naive", "naive bmm", _naive),
        Variant("sdpa", "torch SDPA", _sdpa),
        Variant("cpu", "fused (cpu)", ours("cpu"), ops.why_unavailable),
    )
}


def usable_variants(names: Iterable[str] = VARIANTS) -> list[Variant]:
    """The named variants that can run here. ValueError for a name that is none."""
    chosen = []
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"a variant is one of {', '.join(VARIANTS)}, got {name!r}")
        if VARIANTS[name].why_unavailable() is None:
            chosen.append(VARIANTS[name])
    return chosen
