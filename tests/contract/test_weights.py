"""`attention_weights`: the weights of some queries, without those of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_kernels as tk
from tests.support.oracle import plain_attention
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule

B, H, H_kv, M, N, D = 2, 4, 2, 11, 17, 5
ROWS = [7, 0, -1, 7]
Options = dict[str, Any]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, M, D).to(dtype), torch.randn(B, H_kv, N, D).to(dtype)


def weights(q: Tensor, k: Tensor, *, mask: tk.Mask | None = None, **options: Any) -> Tensor:
    """The weights of all queries, by plain torch: the product with the identity."""
    identity = torch.eye(N, dtype=q.dtype).expand(B, H_kv, N, N)
    visible = None if mask is None else mask.materialize(B, H, M, N)
    return plain_attention(q, k, identity, visible=visible, **options)[0]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


IDS = torch.arange(N)[None].expand(B, -1) // 4
MASKS = {
    "causal": tk.Mask.causal(),
    "bottom right": tk.Mask.window(4, 1, align="bottom_right"),
    "range": tk.Mask.key_range(torch.tensor([2, 0]), torch.tensor([9, 0])),
    "segments": tk.Mask.segments(IDS[:, :M], IDS)
    & tk.Mask.segments(IDS[:, 2:13], IDS, equal=False),
    "positions": tk.Mask.positions(torch.rand(B, H, M).mul(9).long(), IDS, 2, 0),
    "dense": tk.Mask.dense(torch.rand(H, M, N) > 0.5),
    "columns": tk.Mask.dense(torch.rand(N) > 0.5),
    "blocks": tk.Mask.block_sparse(torch.rand(H, 4, 6) > 0.4, 3),
}
CASES: dict[str, Callable[[], Options]] = {
    "plain": dict,
    **{name: partial(dict, mask=mask) for name, mask in MASKS.items()},
    "scale": lambda: {"scale": 0.3, "softcap": 1.5},
    "bias": lambda: {"bias": leaf(B, 1, M, N)},
    "bias of columns": lambda: {"bias": leaf(N), "mask": MASKS["dense"]},
    "alibi": lambda: {"bias": tk.alibi(tk.alibi_slopes(H).double())},
    "alibi from the end": lambda: {
        "bias": tk.alibi(tk.alibi_slopes(H).double(), align="bottom_right"),
        "mask": MASKS["bottom right"],
    },
    "slopes with a gradient": lambda: {"bias": tk.alibi(leaf(H))},
    "table": lambda: {"relative": tk.relative_bias(leaf(H, 9), lowest=-6), "bias": leaf(M, N)},
    "keys": lambda: {
        "relative": tk.relative_keys(leaf(H, 9, D), table=leaf(1, 9), lowest=-3),
        "mask": MASKS["causal"],
    },
    "sinks": lambda: {"sinks": leaf(H), "mask": MASKS["range"]},
}


def leaves_of(options: Options) -> list[Tensor]:
    found = []
    for x in options.values():
        x = getattr(x, "slopes", x)
        parts = x.tensors() if isinstance(x, tk.RelativeBias | tk.RelativeKeys) else (x,)
        found += [part for part in parts if isinstance(part, Tensor) and part.requires_grad]
    return found


@each("case", CASES)
def test_rows_of_all_weights(case: str) -> None:
    q, k = (x.requires_grad_() for x in inputs())
    options = CASES[case]()
    leaves = [q, k, *leaves_of(options)]
    expected = weights(q, k, **options)[:, :, ROWS]
    p = tk.attention_weights(q, k, rows=ROWS, **options)
    assert_same_function(p, expected)
    dp = torch.randn_like(p)
    for got, want in zip(
        torch.autograd.grad(p, leaves, dp), torch.autograd.grad(expected, leaves, dp), strict=True
    ):
        assert_same_function(got, want)


@pytest.mark.quick
def test_half_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k = inputs(dtype)
        p = tk.attention_weights(q, k, rows=ROWS, mask=MASKS["segments"])
        assert p.dtype == dtype
        exact = weights(q.double(), k.double(), mask=MASKS["segments"])[:, :, ROWS]
        plain = weights(q, k, mask=MASKS["segments"])[:, :, ROWS]
        assert_within_rule("p", p, exact, plain)


def test_a_learned_scale_and_autocast() -> None:
    q, k = inputs(torch.float32)
    scale = torch.tensor(0.3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = tk.attention_weights(q, k, rows=ROWS, scale=scale)
    scaled = (q * scale).bfloat16()
    assert torch.equal(p, tk.attention_weights(scaled, k.bfloat16(), rows=ROWS, scale=1.0))
    assert torch.autograd.grad(p[..., 0].sum(), scale)[0].isfinite()


def test_hidden_nan() -> None:
    q, k = inputs()
    k[0, :, 9:] = float("nan")  # beyond the range of the first entry; the second sees no key
    p = tk.attention_weights(q, k, rows=[3], mask=MASKS["range"])
    assert p.isfinite().all()
    assert not p[1].any()


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_memory_is_that_of_the_rows() -> None:
    q, k = (torch.randn(1, 1, 99, 4) for _ in range(2))
    mask = tk.Mask.causal() & tk.Mask.segments(torch.arange(99)[None] // 9)
    mask &= tk.Mask.block_sparse(torch.ones(10, 10, dtype=torch.bool), 10)
    relative = tk.relative_keys(torch.randn(1, 5, 4), table=torch.randn(1, 5), lowest=0)
    options: Options = {"bias": tk.alibi(torch.ones(1)), "relative": relative, "mask": mask}
    with LargestTensor() as largest:
        tk.attention_weights(q, k, rows=[50, 2], **options)
    assert largest.elements < 99 * 99 / 4


def test_rows() -> None:
    q, k = inputs()
    expected = tk.attention_weights(q, k, rows=[2, 9, 10])
    for rows in (range(2, 11, 7), (2, 9), torch.tensor([2, -2]), torch.tensor([2, 9]).byte()):
        assert torch.equal(tk.attention_weights(q, k, rows=rows), expected[:, :, :2])
    assert tk.attention_weights(q, k, rows=[]).shape == (B, H, 0, N)
    assert tk.attention_weights(q, k[:, :, :0], rows=[1]).shape == (B, H, 1, 0)
