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

from tests.fuzz.calls import Call
from tests.support.backends import dtypes_of
from tests.support.runtime import poisoned_memory
from tests.support.runtime import threads as torch_threads
from transformer_kernels import _C, Mask, attention

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

    def mapped(self, names: str, change: Callable[[Tensor], Tensor]) -> Example:
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
            expected = self.run(x)
            got = _CHANGED[self.change](self, x, expected)
        for name, (value, other) in got.items():
            message = f"{name} differs at {int((value != other).sum())} of {value.numel()} places"
            assert torch.equal(value.nan_to_num(nan=1e30), other.nan_to_num(nan=1e30)), message

    def example(self) -> Example:
        """The inputs of the call, the same for the same fields."""
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
        """The mask of the call."""
        match self.mask:
            case "none":
                return None
            case "causal":
                return Mask.causal()
            case "window":
                return Mask.window(self.N // 3, 1)
            case "dense":
                return Mask.dense(x.visible)
            case "padding":
                return Mask.padding(x.key_lengths)

    def run(self, x: Example, mask: Mask | None = None) -> dict[str, Tensor]:
        """Returns o, lse and the gradients, by name."""
        inputs = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        mask = self.mask_of(x) if mask is None else mask
        o, lse = self._attention(*inputs, mask=mask, return_lse=True)
        dq, dk, dv = torch.autograd.grad(o, inputs, x.do)
        return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}

    def _attention(self, *inputs: Tensor, **options: Any) -> Any:
        return attention(*inputs, softcap=self.softcap, backend=self.backend, **options)

    def splits_keys(self) -> bool:
        """True if dq may depend on the number of threads and of heads: the CPU's backward pass then
        splits the keys."""
        return self.backend == "cpu" and self.threads > 1 and self.N > 64


_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "large": lambda t: t * 100,
    "nan": lambda t: torch.full_like(t, math.nan),
    "inf": lambda t: torch.full_like(t, math.inf),
    "masked": torch.zeros_like,
}
Pairs = dict[str, tuple[Tensor, Tensor]]


def _paired(
    call: Bits,
    expected: dict[str, Tensor],
    got: dict[str, Tensor],
    cut: Callable[[Tensor], Tensor] = lambda x: x,
    cut_keys: Callable[[Tensor], Tensor] | None = None,
    *,
    splits_differ: bool = False,
) -> Pairs:
    """Pairs of the tensors that must be equal; `cut_keys` is the part of dk and dv, if another."""
    pairs = {}
    for name, value in got.items():
        part = cut_keys if cut_keys and name in ("dk", "dv") else cut
        if name != "dq" or not splits_differ or not call.splits_keys():
            pairs[name] = (part(expected[name]), value)
    return pairs


def _repeat(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    return _paired(call, expected, call.run(x))


def _threads(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    with torch_threads(1):
        return _paired(call, expected, call.run(x), splits_differ=True)


def _alone(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    got = call.run(x.mapped("q k v do visible key_lengths", lambda t: t[:1]))
    return _paired(call, expected, got, lambda t: t[:1], splits_differ=True)


def _head(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    one = x.mapped("q do", lambda t: t[:, : call.group]).mapped("k v", lambda t: t[:, :1])
    return _paired(
        call, expected, call.run(one),
        lambda t: t[:, : call.group], lambda t: t[:, :1], splits_differ=True,
    )  # fmt: skip


def _others(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    def changed(t: Tensor) -> Tensor:
        return torch.cat([t[:1], _OTHERS[call.others](t[1:])])

    names = "visible key_lengths" if call.others == "masked" else "q k"
    got = call.run(x.mapped(names, changed))
    return _paired(
        call, {n: t[:1] for n, t in expected.items()}, {n: t[:1] for n, t in got.items()}
    )


def _layout(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    def moved(t: Tensor) -> Tensor:
        """Neither aligned nor contiguous, in the order (B, length, H, width)."""
        B, H, length, width = t.shape
        memory = torch.full((B, length, H, 2 * width + 1), math.nan, dtype=t.dtype)
        return memory[..., 1::2].transpose(1, 2).copy_(t)

    return _paired(call, expected, call.run(x.mapped("q k v do", moved)))


def _options(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    return {"o": (expected["o"], call._attention(x.q, x.k, x.v, mask=call.mask_of(x)))}


def _hidden(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    def longer(t: Tensor) -> Tensor:
        return torch.cat([t, torch.full_like(t[:, :, :1], math.nan).expand(-1, -1, 67, -1)], dim=2)

    y = x.mapped("k v", longer).mapped("visible", lambda t: torch.nn.functional.pad(t, (0, 67)))
    mask = Mask.padding(torch.full((call.B,), call.N)) & (call.mask_of(y) or Mask())
    got = call.run(y, mask)
    got |= {name: got[name][:, :, : call.N] for name in ("dk", "dv")}
    return _paired(replace(call, N=call.N + 67), expected, got, splits_differ=True)


def _dense(call: Bits, x: Example, expected: dict[str, Tensor]) -> Pairs:
    visible = (call.mask_of(x) or Mask()).materialize(call.B, x.q.shape[1], call.M, call.N)
    return _paired(call, expected, call.run(x, Mask.dense(visible)))


_CHANGED: dict[str, Callable[[Bits, Example, dict[str, Tensor]], Pairs]] = {
    "repeat": _repeat,
    "threads": _threads,
    "alone": _alone,
    "head": _head,
    "others": _others,
    "layout": _layout,
    "options": _options,
    "hidden": _hidden,
    "dense": _dense,
}


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
