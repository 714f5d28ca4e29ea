"""Bit-identical results: one call, and the same call changed in a way that promises equal bits.

docs/reliability.md lists what the bits of a row depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from tests.fuzz.calls import Call
from tests.support.backends import dtypes_of
from tests.support.runtime import poisoned_memory
from tests.support.runtime import threads as torch_threads
from transformer_kernels import _C, Mask, attention

Results = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]
Kind = Literal["none", "causal", "window", "dense", "padding"]
Others = Literal["large", "nan", "inf", "masked"]
KINDS: tuple[Kind, ...] = ("none", "causal", "window", "dense", "padding")
OTHERS: tuple[Others, ...] = ("large", "nan", "inf", "masked")
CHANGES = {
    "repeat": ("cpu", "triton", "cuda", "reference"),
    "threads": ("cpu",),
    "alone": ("cpu", "triton", "cuda"),
    "head": ("cpu", "triton", "cuda"),
    "others": ("cpu", "triton", "cuda"),
    "layout": ("cpu", "triton"),
    "options": ("cpu", "triton", "cuda", "reference"),
    "hidden": ("cpu", "triton", "cuda"),
    "dense": ("cpu", "cuda"),
}
"""Changes of a call that keep its bits, and the backends that promise it:

repeat: nothing; threads: their number; alone: the first batch entry is computed alone; head: the
first key head and its query heads are computed alone; others: values of the other batch entries,
see `Bits.others`; layout: strides and alignment of the inputs; options: no lse and no gradient are
wanted; hidden: keys that hold NaN are appended and hidden; dense: the mask is a bool tensor.
"""


_NOT_ON_AMX = {
    "hidden": "float32 with at most 32 queries and keys uses another engine",
    "dense": "products of several tiles are added in another order",
    "nan": "the multiply-add engine repeats the whole call",
    "inf": "the multiply-add engine repeats the whole call",
}


def promised(backend: str) -> list[str]:
    """Returns the changes that keep the bits of a backend on this CPU."""
    on_amx = backend == "cpu" and _C.isa() == "amx"
    return [c for c, who in CHANGES.items() if backend in who and not (on_amx and c in _NOT_ON_AMX)]


def promised_others(backend: str) -> list[Others]:
    """Returns the values of other batch entries that keep the bits of the first one."""
    on_amx = backend == "cpu" and _C.isa() == "amx"
    return [other for other in OTHERS if not (on_amx and other in _NOT_ON_AMX)]


@dataclass(frozen=True)
class Example:
    """Arguments of one call and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    visible: Tensor
    """of `dense` and `padding` masks: (B, 1, M, N)"""
    key_lengths: Tensor
    """of `padding` masks: (B,)"""

    def mapped(self, names: str, change: Change) -> Example:
        """Returns the example with `change` applied to the tensors named in `names`."""
        return replace(self, **{name: change(getattr(self, name)) for name in names.split()})


@dataclass(frozen=True, kw_only=True, repr=False)
class Bits(Call):
    """A call of `attention`, a change of it, and the claim that both have equal bits."""

    backend: str = "cpu"
    change: str = "repeat"
    others: Others = "large"
    dtype: str = "float32"
    B: int = 1
    H_kv: int = 1
    group: int = 1
    M: int = 1
    N: int = 1
    D: int = 1
    D_v: int = 1
    mask: Kind = "none"
    softcap: float | None = None
    threads: int = 1
    seed: int = 0

    def check(self) -> None:
        """Asserts that o, lse and the gradients have the same bits after the change."""
        x = self.example()
        with poisoned_memory(), torch_threads(self.threads):
            expected, got = self._compared(x, self.run(x))
        for name, value in expected.items():
            other = got[name]
            message = f"{name} differs at {int((value != other).sum())} of {value.numel()} places"
            assert torch.equal(value.nan_to_num(nan=1e30), other.nan_to_num(nan=1e30)), message

    def _compared(self, x: Example, expected: Results) -> tuple[Results, Results]:
        """What must be equal, of the results of the call and of the changed one."""
        match self.change:
            case "threads":
                with torch_threads(1):
                    return self._unsplit(expected), self.run(x)
            case "alone":
                got = self.run(x.mapped("q k v do visible key_lengths", _first))
                return self._unsplit(_cut(expected, _first)), got
            case "head":
                got = self.run(
                    x.mapped("q do", lambda t: t[:, : self.group]).mapped("k v", lambda t: t[:, :1])
                )
                one = _cut(expected, lambda t: t[:, : self.group], lambda t: t[:, :1])
                return self._unsplit(one), got
            case "others":
                change = _OTHERS[self.others]
                names = "visible key_lengths" if self.others == "masked" else "q k"
                got = self.run(x.mapped(names, lambda t: torch.cat([t[:1], change(t[1:])])))
                return _cut(expected, _first), _cut(got, _first)
            case "layout":
                return expected, self.run(x.mapped("q k v do", _moved))
            case "options":
                return {"o": expected["o"]}, {
                    "o": self._attention(x.q, x.k, x.v, mask=self.mask_of(x))
                }
            case "hidden":
                y = x.mapped("k v", _longer).mapped("visible", lambda t: pad(t, (0, 67)))
                mask = Mask.padding(torch.full((self.B,), self.N)) & (self.mask_of(y) or Mask())
                got = _cut(self.run(y, mask), lambda t: t, lambda t: t[:, :, : self.N])
                return replace(self, N=self.N + 67)._unsplit(expected), got
            case "dense":
                mask = self.mask_of(x) or Mask()
                visible = mask.materialize(self.B, x.q.shape[1], self.M, self.N)
                return expected, self.run(x, Mask.dense(visible))
        assert self.change == "repeat"
        return expected, self.run(x)

    def example(self) -> Example:
        g = torch.Generator().manual_seed(self.seed)
        H_q, dtype = self.H_kv * self.group, getattr(torch, self.dtype)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(self.B, *shape, generator=g).to(dtype)

        visible = torch.rand(self.B, 1, self.M, self.N, generator=g) < 0.7
        lengths = torch.randint(0, self.N + 1, (self.B,), generator=g)
        return Example(
            numbers(H_q, self.M, self.D), numbers(self.H_kv, self.N, self.D),
            numbers(self.H_kv, self.N, self.D_v), numbers(H_q, self.M, self.D_v), visible, lengths,
        )  # fmt: skip

    def mask_of(self, x: Example) -> Mask | None:
        masks: dict[Kind, Callable[[], Mask | None]] = {
            "none": lambda: None,
            "causal": Mask.causal,
            "window": lambda: Mask.window(self.N // 3, 1),
            "dense": lambda: Mask.dense(x.visible),
            "padding": lambda: Mask.padding(x.key_lengths),
        }
        return masks[self.mask]()

    def run(self, x: Example, mask: Mask | None = None) -> Results:
        inputs = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        mask = self.mask_of(x) if mask is None else mask
        o, lse = self._attention(*inputs, mask=mask, return_lse=True)
        dq, dk, dv = torch.autograd.grad(o, inputs, x.do)
        return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}

    def _attention(self, *inputs: Tensor, **options: Any) -> Any:
        return attention(*inputs, softcap=self.softcap, backend=self.backend, **options)

    def _unsplit(self, results: Results) -> Results:
        """The results without dq if it may depend on the number of threads and of heads: the CPU's
        backward pass then splits the keys."""
        splits_keys = self.backend == "cpu" and self.threads > 1 and self.N > 64
        return {name: x for name, x in results.items() if not (splits_keys and name == "dq")}


_OTHERS: dict[str, Change] = {
    "large": lambda t: t * 100,
    "nan": lambda t: torch.full_like(t, math.nan),
    "inf": lambda t: torch.full_like(t, math.inf),
    "masked": torch.zeros_like,
}


def _cut(results: Results, cut: Change, cut_keys: Change | None = None) -> Results:
    """Parts of all results; `cut_keys` cuts dk and dv, if another."""
    keys = cut_keys or cut
    return {n: (keys if n in ("dk", "dv") else cut)(x) for n, x in results.items()}


def _first(x: Tensor) -> Tensor:
    return x[:1]


def _moved(x: Tensor) -> Tensor:
    """A copy that is neither aligned nor contiguous, in the order (B, length, H, width)."""
    B, H, length, width = x.shape
    memory = torch.full((B, length, H, 2 * width + 1), math.nan, dtype=x.dtype)
    return memory[..., 1::2].transpose(1, 2).copy_(x)


def _longer(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x[:, :, :1], math.nan).expand(-1, -1, 67, -1)], dim=2)


def bits_calls(backends: Sequence[str]) -> st.SearchStrategy[Bits]:
    """Strategy of calls for which equal bits are promised."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Bits:
        backend = draw(st.sampled_from(backends))
        slow = backend in ("triton", "cuda")
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes_of(backend)]
        length = st.one_of(st.integers(1, 40), st.integers(1, 140 if slow else 300))
        width = st.sampled_from([1, 7, 8, 16, 64, *([] if slow else [33, 128])])
        return Bits(
            backend=backend,
            change=draw(st.sampled_from(promised(backend))),
            others=draw(st.sampled_from(promised_others(backend))),
            dtype=draw(st.sampled_from(names)),
            B=draw(st.integers(1, 3)),
            H_kv=draw(st.integers(1, 2)),
            group=draw(st.integers(1, 3)),
            M=draw(length),
            N=draw(length),
            D=draw(width),
            D_v=draw(width),
            mask=draw(st.sampled_from(KINDS)),
            softcap=draw(st.sampled_from([None, 5.0])),
            threads=draw(st.integers(1, 5)),
            seed=draw(st.integers(0, 9)),
        )

    return drawn()
