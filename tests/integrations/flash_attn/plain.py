"""The functions of flash_attn by their documentation, in plain torch, in the inputs' dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tests.support.oracle import plain_attention
from transformer_kernels.bench.tolerance import assert_within_rule

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 3)},
    "itself": {"window_size": (0, 0)},
    "left": {"window_size": (20, -1)},
    "right": {"window_size": (-1, 2), "softmax_scale": 0.3},
    "causal-window": {"causal": True, "window_size": (12, 5)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]), "causal": True},
    "alibi-by-entry": {"alibi_slopes": torch.arange(1, 13).view(3, 4) / 16},
    "sinks": {"s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0]), "causal": True},
}
"""Keyword arguments of calls with three batch entries and four heads."""
PACKED_OPTIONS = {name: x for name, x in OPTIONS.items() if "s_aux" not in x}
"""Those of the packed forms, which have no sinks in any flash_attn."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse) of q (batch, M, heads, headdim), k and v (batch, N, heads_k, headdim).

    Keys before `first` are hidden.
    """
    M, N = q.shape[1], k.shape[1]
    i, j = torch.arange(M)[:, None] + N - M, torch.arange(N)
    left, right = window_size[0], 0 if causal else window_size[1]
    visible = (j >= first).expand(M, N)
    visible = visible if left < 0 else visible & (j >= i - left)
    visible = visible if right < 0 else visible & (j <= i + right)
    bias: Tensor | None = None
    if alibi_slopes is not None:
        bias = (-alibi_slopes[..., None, None] * (i - j).abs()).to(q.dtype)
    o, lse = plain_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        visible=visible, bias=bias, scale=softmax_scale, softcap=softcap or None,
        sinks=s_aux,
    )  # fmt: skip
    return o.transpose(1, 2), lse


def starts(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    lse: bool = False,
    **options: Any,
) -> Tensor:
    """Returns o of packed sequences, or their lse. Slopes may be (batch, heads)."""
    slopes = options.pop("alibi_slopes", None)
    parts = []
    for b, one in enumerate(
        zip(
            q.split(list(lengths_q)),
            k.split(list(lengths_k)),
            v.split(list(lengths_k)),
            strict=True,
        )
    ):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        parts.append(attend(*(x[None] for x in one), alibi_slopes=own, **options)[lse][0])
    return torch.cat(parts, dim=1 if lse else 0)


def in_pages(x: Tensor, lengths: Sequence[int], page_size: int, table: Tensor) -> Tensor:
    """Returns (blocks, page_size, heads, headdim), with NaN in rows that are not in use."""
    pages = x.new_full((int(table.max()) + 2, page_size, *x.shape[1:]), torch.nan)
    for b, (start, end) in enumerate(pairwise([0, *accumulate(lengths)])):
        for n, row in enumerate(range(start, end, page_size)):
            part = x[row : min(end, row + page_size)]
            pages[table[b, n], : len(part)] = part
    return pages


def with_gradients(
    call: Callable[..., Tensor], tensors: tuple[Tensor, ...], do: Tensor
) -> dict[str, Tensor]:
    """Returns o, and the gradients of the tensors by their number."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    o = call(*leaves)
    gradients = torch.autograd.grad(o, leaves, do)
    return {"o": o.detach()} | {f"d{n}": x for n, x in enumerate(gradients)}


def _with_sinks(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes `s_aux` the last argument."""
    return lambda *tensors: call(*tensors[:-1], s_aux=tensors[-1])


def assert_agrees(
    call: Callable[..., Tensor],
    expected: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    **options: Any,
) -> None:
    """Asserts the tolerance rule for o and the gradients of `call`, against float64. Both functions
    get the options; the sinks `s_aux` are differentiated too."""
    call, expected = partial(call, **options), partial(expected, **options)
    if (sinks := options.get("s_aux")) is not None:
        call, expected = _with_sinks(call), _with_sinks(expected)
        tensors = (*tensors, sinks)
    do = torch.randn_like(expected(*tensors))
    got, plain = with_gradients(call, tensors, do), with_gradients(expected, tensors, do)
    exact = with_gradients(expected, tuple(x.double() for x in tensors), do.double())
    for name, value in got.items():
        assert_within_rule(name, value, exact[name], plain[name])
