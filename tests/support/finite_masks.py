"""Calls with rows that a large negative bias hides, and their exact results.

Scores before the bias are multiples of 1/16 below 2^5, so that every order of summation gives the
same ones. Adding the bias rounds them: the weights of a hidden row are those of rounded scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.oracle import distances, repeat_heads
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.problem.types import accumulate_dtype
from transformer_kernels.scores import philox
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.relative import RelativeBias, RelativeKeys

B, H_Q, H_KV, M, N, D, D_V = 1, 2, 1, 37, 70, 16, 24
SCALE = 0.25
SEED = 7
SMALLEST = torch.finfo(torch.float32).min
Options = dict[str, Any]
Results = dict[str, Tensor]


class Call(NamedTuple):
    """Inputs and options of one call; `differentiable` are the tensors by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    options: Options

    def differentiable(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v}
        bias, relative = self.options.get("bias"), self.options.get("relative")
        if isinstance(bias, Tensor):
            named["bias"] = bias
        if isinstance(relative, RelativeBias):
            named["table"] = relative.table
        if isinstance(relative, RelativeKeys):
            named["keys"] = relative.keys
        return named


def _rows(value: float, dtype: torch.dtype) -> Tensor:
    """Hides rows 3 to 8, and keys 20 to 39 from all rows."""
    bias = torch.zeros(1, 1, M, N, dtype=dtype)
    bias[:, :, 3:9] = value
    bias[..., 20:40] = value
    return bias


def _head(value: float, dtype: torch.dtype) -> Tensor:
    """Hides all rows of the second head."""
    return torch.tensor([0.0, value], dtype=dtype).view(1, H_Q, 1, 1).expand(1, H_Q, 1, N)


def _far() -> tk.Mask:
    """Shows keys at both sides, of equal distances, and none near the diagonal."""
    i, j = torch.arange(M)[:, None], torch.arange(N)
    return tk.Mask.dense((i - j).abs() >= 7)


CASES: dict[str, Callable[[torch.dtype, torch.dtype], Options]] = {
    "rows-1e4": lambda _, wide: {"bias": _rows(-1e4, wide)},
    "rows-1e6": lambda _, wide: {"bias": _rows(-1e6, wide)},
    "rows-1e9": lambda _, wide: {"bias": _rows(-1e9, wide)},
    "rows-smallest": lambda _, wide: {"bias": _rows(SMALLEST, wide)},
    "rows-own-dtype": lambda dtype, _: {"bias": _rows(torch.finfo(dtype).min, dtype)},
    "head": lambda _, wide: {"bias": _head(-1e6, wide)},
    "causal": lambda _, wide: {"bias": _rows(-1e9, wide), "mask": tk.Mask.causal()},
    "window": lambda _, wide: {"bias": _rows(SMALLEST, wide), "mask": tk.Mask.window(4, 3)},
    "dropout": lambda _, wide: {"bias": _rows(-1e6, wide), "dropout_p": 0.3, "seed": SEED},
    "softcap": lambda _, wide: {"bias": _head(-1e9, wide), "softcap": 20.0},
    "alibi": lambda _, wide: {
        "bias": tk.alibi(torch.tensor([1.0, 3.0], dtype=wide) * 2.0**20), "mask": _far(),
    },
    "relative": lambda _, wide: {
        "relative": tk.relative_bias(torch.full((1, 5), -1e6, dtype=wide), lowest=-2),
    },
    "keys": lambda dtype, wide: {
        "bias": _rows(-1e9, wide),
        "relative": tk.relative_keys(_halves((1, 5, D), dtype) / 2, lowest=-2),
    },
    "products": lambda *_: {},
}  # fmt: skip
"""Options by the dtype of the inputs and that of statistics."""


def make_call(case: str, dtype: torch.dtype) -> Call:
    call = draw(CASES[case](dtype, accumulate_dtype(dtype)), dtype)
    return with_shared_product(call) if case == "products" else call


def with_shared_product(call: Call) -> Call:
    """Adds a large number to all scores of a row, which are then multiples of 1/4: the ulp of 2^21
    in float32."""
    q, k = call.q * 2, call.k * 2
    q[..., 0], k[..., 0] = (2.0**15 if q.dtype == torch.float16 else 2.0**20), 8.0
    return call._replace(q=q, k=k)


def draw(options: Options, dtype: torch.dtype, M: int = M, N: int = N) -> Call:
    q, k = _halves((B, H_Q, M, D), dtype), _halves((B, H_KV, N, D), dtype)
    v, do = (torch.randn(B, *shape, D_V).to(dtype) for shape in ((H_KV, N), (H_Q, M)))
    return Call(q, k, v, do, torch.randn(B, H_Q, M, dtype=accumulate_dtype(dtype)), options)


def _halves(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Multiples of 1/2 from -1 to 1."""
    return torch.randint(-2, 3, shape).to(dtype) / 2


def by_backend(call: Call, backend: str) -> Results:
    """Returns o, lse, dq, dk, dv and the gradients of the biases."""
    leaves = {name: x.clone().requires_grad_() for name, x in call.differentiable().items()}
    options = _with_leaves(call.options, leaves)
    options |= {"scale": SCALE, "return_lse": True, "backend": backend}
    o, lse = tk.attention(leaves["q"], leaves["k"], leaves["v"], **options)
    return _with_gradients(call, leaves, o, lse)


def by_formula(call: Call, dtype: torch.dtype) -> Results:
    """The same by plain torch, from scores rounded to the dtype of statistics. The scores are
    computed in float64 or float32, the products with weights in `dtype`."""
    wide = accumulate_dtype(dtype)
    leaves = {
        name: x.to(dtype if x.dtype == call.q.dtype else wide).requires_grad_()
        for name, x in call.differentiable().items()
    }
    options = _with_leaves(call.options, leaves)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    s = SCALE * (q.to(wide) @ repeat_heads(k, q).to(wide).mT)
    _, H, M, N = s.shape
    relative, bias = options.get("relative"), options.get("bias")
    if isinstance(relative, RelativeKeys):
        by_entry = SCALE * (q.to(wide) @ relative.keys.to(wide).mT)
        s = s + by_entry.gather(3, distances(relative, M, N).expand(s.shape))
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if isinstance(relative, RelativeBias):
        s = s + relative.table.to(wide)[:, distances(relative, M, N)]
    if bias is not None:
        s = s + (bias.dense(M, N) if isinstance(bias, Alibi) else bias).to(wide)
    s = s + (s.detach().to(accumulate_dtype(call.q.dtype)).to(wide) - s.detach())
    if "mask" in options:
        s = s.masked_fill(~options["mask"].materialize(B, H, M, N), float("-inf"))
    p = s.softmax(-1)
    if "dropout_p" in options:
        dropout_p = options["dropout_p"]
        p = p * philox.keep_mask(torch.tensor(SEED), B, H, M, N, dropout_p)
        p = p * philox.keep_factor(dropout_p)
    o = p.to(dtype) @ repeat_heads(v, q)
    # Torch's gradient of logsumexp is exp(s - lse), which has lost log l where lse is large.
    largest = s.detach().amax(-1)
    return _with_gradients(call, leaves, o, largest + (s - largest[..., None]).logsumexp(-1))


def _with_leaves(options: Options, leaves: Mapping[str, Tensor]) -> Options:
    options = dict(options)
    if "bias" in leaves:
        options["bias"] = leaves["bias"]
    if "table" in leaves:
        options["relative"] = tk.relative_bias(leaves["table"], lowest=-2)
    if "keys" in leaves:
        options["relative"] = tk.relative_keys(leaves["keys"], lowest=-2)
    return options


def _with_gradients(call: Call, leaves: dict[str, Tensor], o: Tensor, lse: Tensor) -> Results:
    given = call.do.to(o.dtype), call.dlse.to(lse.dtype)
    gradients = torch.autograd.grad((o, lse), list(leaves.values()), given)
    names = [f"d{name}" for name in leaves]
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}


def assert_exact(call: Call, backend: str) -> None:
    """Asserts the tolerance rule. All gradients are compared in the dtype of q, because delta is
    computed from o as it is stored."""
    exact, plain = by_formula(call, torch.float64), by_formula(call, call.q.dtype)
    for name, got in by_backend(call, backend).items():
        dtype = got.dtype if name == "lse" else call.q.dtype
        assert_within_rule(name, got.to(dtype), exact[name], plain[name])
