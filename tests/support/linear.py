"""Cases of linear attention: dense calls, packed sequences and steps, and their definition."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import NAMES, TABLE_WAYS, dtypes_of
from tests.support.case import AnyCase, Device, Expected, Layout, Outputs, lay_out
from tests.support.linear_oracle import LinearPart, Results, allowed_errors
from tests.support.masks import KeyRange, Sizes
from tests.support.oracle import Bound, Rounding
from transformer_kernels.functional.explain import explain
from transformer_kernels.linear.attention import LINEAR, LINEAR_BACKENDS
from transformer_kernels.linear.types import FEATURE_MAPS, Inputs, Options
from transformer_kernels.problem.types import accumulate_dtype

LINEAR_NAMES = tuple(backend.name for backend in LINEAR_BACKENDS if backend.name in NAMES)
"""Backends of linear attention that run on CPU tensors."""
LINEAR_WAYS = tuple((name, dtype) for name in LINEAR_NAMES for dtype in dtypes_of(name))
LINEAR_TABLE_WAYS = tuple(
    way for way in TABLE_WAYS if way[0] in {backend.name for backend in LINEAR_BACKENDS}
)
LINEAR_FLOAT64 = tuple(name for name, dtype in LINEAR_WAYS if dtype == torch.float64)


def widest(backend: str) -> torch.dtype:
    """Returns float64, or float32 for a backend without it."""
    return dtypes_of(backend)[0]


def linear_arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> dict[str, Any]:
    """Arguments of the forward operators, by name in their order."""
    names = (field.name for field in LINEAR.fields)
    return dict(zip(names, LINEAR.pack(Inputs(q, k, v), Options("elu")), strict=True)) | given


def operators_of(backend: Any, device: str = "cpu") -> list[Any]:
    """Returns the operators of a backend: of a forward pass, of a backward pass, and of steps."""
    namespace = backend.operators(torch.device(device))
    return [getattr(namespace, name).default for name in backend.names]


class LinearInputs(NamedTuple):
    """Tensors of a call, and the cotangents of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    S: Tensor | None
    z: Tensor | None
    do: Tensor
    ds: Tensor
    dz: Tensor

    def differentiable(self) -> dict[str, Tensor]:
        return {n: x for n, x in self._asdict().items() if x is not None and n[0] != "d"}

    def to(self, to: torch.dtype) -> LinearInputs:
        """Returns leaves in another dtype."""
        return LinearInputs._make(
            None if x is None else x.detach().to(to).requires_grad_() for x in self
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearCase(AnyCase):
    """One call of `linear_attention`; of `linear_attention_varlen` with `packed`; or calls of
    `linear_attention_decode` with `steps`."""

    B: int = 2
    H_q: int = 2
    H_kv: int = 2
    M: int = 0
    """queries, if not causal; 0: as many as keys"""
    N: int = 70
    D: int = 8
    D_v: int = 8
    packed: tuple[int, ...] = ()
    """lengths of packed sequences; B and N are not used"""
    trailing: int = 0
    """rows of trailing padding of packed sequences"""
    steps: tuple[int, ...] = ()
    """numbers of tokens of the calls; N is not used"""
    feature_map: Literal["elu", "relu", "identity"] = "elu"
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    decay: Literal["", "head", "token", "reset"] = ""
    state: bool = False
    mask: KeyRange | None = None
    layout: Layout = "contiguous"

    @property
    def keys(self) -> int:
        return sum(self.packed or self.steps) + self.trailing or self.N * (not self.packed)

    @property
    def sequences(self) -> int:
        return len(self.packed) or self.B

    def hidden(self) -> Tensor:
        """Hidden keys: bool (B, N)."""
        if self.mask is None:
            return torch.zeros(self.B, self.keys, dtype=torch.bool)
        return ~self.mask.visible(Sizes(self.B, 1, 1, self.keys))[:, 0, 0]

    def inputs(self, dtype: torch.dtype, device: Device = "cpu") -> LinearInputs:
        """Random inputs. Hidden keys and values, and their decay, and trailing padding are NaN."""
        generator, real = self.generator(), accumulate_dtype(dtype)
        queries = self.keys if self.causal else self.M or self.keys
        hidden = self._dead()

        def draw(*shape: int, positive: bool = False) -> Tensor:
            return (torch.rand if positive else torch.randn)(shape, generator=generator)

        def rows(heads: int, length: int, width: int, dead: Tensor | None) -> Tensor:
            shape = (length, heads, width) if self.packed else (self.B, heads, length, width)
            x = draw(*shape).to(dtype)
            if dead is not None and self.layout != "expanded":
                x = x.masked_fill(dead, math.nan)
            x = lay_out(x[None] if self.packed else x, self.layout)
            return (x[0] if self.packed else x).to(device)

        dead_q = hidden if self.packed else None
        x = {
            "q": rows(self.H_q, queries, self.D, dead_q),
            "k": rows(self.H_kv, self.keys, self.D, hidden),
            "v": rows(self.H_kv, self.keys, self.D_v, hidden),
            "log_decay": self._decay(draw, real, hidden),
        }
        S = draw(self.sequences, self.H_kv, self.D, self.D_v).to(real)
        z = draw(self.sequences, self.H_kv, self.D, positive=True).to(real) + 1
        if self.state:
            x |= {"S": S, "z": z}
        elif self.steps:
            x |= {"S": torch.zeros_like(S), "z": torch.zeros_like(z)}
        leaves: dict[str, Any] = {
            name: None if (one := x.get(name)) is None else one.to(device).requires_grad_()
            for name in LinearInputs._fields[:6]
        }
        do = rows(self.H_q, queries, self.D_v, None)
        ds, dz = (draw(*one.shape).to(device, real) for one in (S, z))
        return LinearInputs(**leaves, do=do, ds=ds, dz=dz)

    def _dead(self) -> Tensor:
        """Rows that may hold anything: bool (B, 1, N, 1), or packed (N, 1, 1)."""
        if self.packed:
            return (torch.arange(self.keys) >= sum(self.packed))[:, None, None]
        return self.hidden()[:, None, :, None]

    def _decay(
        self, draw: Callable[..., Tensor], dtype: torch.dtype, dead: Tensor
    ) -> Tensor | None:
        if not self.decay:
            return None
        if self.decay == "head":
            return -draw(self.H_kv, positive=True).to(dtype)
        N = self.keys
        shape = (N, self.H_kv) if self.packed else (self.B, self.H_kv, N)
        decay = -draw(*shape, positive=True).to(dtype) * min(0.4, 28 / max(1, N))
        if self.decay == "reset":
            resets = [n for n in (0, 40, 41, 100) if n < N]
            decay[(resets,) if self.packed else (..., resets)] = -math.inf
        if self.layout == "expanded":
            return decay
        return decay.masked_fill(dead[..., 0], math.nan)

    def run(self, x: LinearInputs, backend: str) -> Outputs:
        options = self._options() | {"backend": backend}
        if self.steps:
            return self._in_steps(x, options)
        initial = None if x.S is None or x.z is None else tk.LinearState(x.S, x.z)
        options |= {"initial_state": initial, "return_state": True}
        arguments, tensors = self._call(x)
        o, end = self._operator(*arguments, **tensors, **options)
        return with_gradients(x, o, *end)

    def reasons(self, backend: str, device: Device = "cpu") -> tuple[str, ...]:
        x = self.inputs(torch.float32, device)
        if self.steps:
            return ()
        arguments, tensors = self._call(x)
        options = self._options() | tensors | {"operator": self._operator, "backend": backend}
        return explain(*arguments, **options).reasons[backend]

    @property
    def _operator(self) -> Any:
        return tk.linear_attention_varlen if self.packed else tk.linear_attention

    def _options(self) -> dict[str, Any]:
        options = {"feature_map": self.feature_map, "normalize": self.normalize, "eps": self.eps}
        return options if self.steps else options | {"causal": self.causal}

    def _call(self, x: LinearInputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The positional arguments, and the tensors among the options."""
        tensors: dict[str, Any] = {"log_decay": x.log_decay}
        if self.mask is not None:
            mask = self.mask.mask(Sizes(self.B, 1, 1, self.keys))
            tensors["mask"] = mask.to(x.q.device)
        starts = torch.tensor([0, *accumulate(self.packed)], device=x.q.device)
        return (x.q, x.k, x.v, *([starts] if self.packed else [])), tensors

    def _in_steps(self, x: LinearInputs, options: dict[str, Any]) -> Outputs:
        assert x.S is not None
        assert x.z is not None
        state, outputs = tk.LinearState(x.S.detach().clone(), x.z.detach().clone()), []
        for ends in pairwise(accumulate(self.steps, initial=0)):
            rows = slice(*ends)
            decay = x.log_decay
            if decay is not None and decay.dim() == 3:
                decay = decay[:, :, rows]
            with torch.no_grad():
                q, k, v = (t[:, :, rows] for t in (x.q, x.k, x.v))
                o = tk.linear_attention_decode(q, k, v, state, log_decay=decay, **options)
            outputs.append(o)
        return {"o": torch.cat(outputs, dim=2), "S_end": state.S, "z_end": state.z}

    def parts(self, x: LinearInputs) -> Iterator[LinearPart]:
        """The attention of each packed sequence, or of all batch entries: views of x."""
        options = (self.feature_map, self.causal, self.normalize, self.eps)
        decay = x.log_decay
        if decay is not None and self.decay == "head":
            decay = decay[:, None].expand(-1, self.keys)
            decay = decay.T if self.packed else decay.expand(self.B, -1, -1)
        if not self.packed:
            yield LinearPart(x.q, x.k, x.v, decay, x.S, x.z, self.hidden(), *options)
        for b, rows in enumerate(pairwise(accumulate(self.packed, initial=0))):
            q, k, v = (t[slice(*rows)].transpose(0, 1)[None] for t in (x.q, x.k, x.v))
            S, z = (None if t is None else t[b : b + 1] for t in (x.S, x.z))
            own = None if decay is None else decay[slice(*rows)].T[None]
            hidden = torch.zeros(1, self.packed[b], dtype=torch.bool)
            yield LinearPart(q, k, v, own, S, z, hidden, *options)

    def joined(self, name: str, values: list[Tensor]) -> Tensor:
        if name == "dlog_decay" and self.decay == "head":
            return torch.stack([value.sum((0, 2)) for value in values]).sum(0)
        if not self.packed:
            return values[0]
        if name in ("S_end", "z_end", "dS", "dz"):
            return torch.cat(values)
        rows = torch.cat(values, dim=2)[0].transpose(0, 1)
        return torch.cat([rows, rows.new_zeros(self.trailing, *rows.shape[1:])])

    def results(self, x: LinearInputs, parts: list[Results]) -> Outputs:
        o, S, z = (
            self.joined(name, list(values))
            for name, values in zip(("o", "S_end", "z_end"), zip(*parts, strict=True), strict=True)
        )
        if self.steps:
            return {"o": o.detach(), "S_end": S.detach(), "z_end": z.detach()}
        return with_gradients(x, o, S, z)

    def by_loop(self, x: LinearInputs) -> Outputs:
        """The definition."""
        return self.results(x, [part.by_loop() for part in self.parts(x)])

    def by_matrix(self, x: LinearInputs) -> Outputs:
        """Plain torch: all weights at once, in the dtype of the inputs."""
        return self.results(x, [part.by_matrix() for part in self.parts(x)])

    def expected(self, dtype: torch.dtype) -> Expected:
        return _expected(self, dtype)

    def bounds(self, dtype: torch.dtype) -> dict[str, Bound]:
        x = self.inputs(dtype).to(torch.float64)
        exact = self.by_loop(x)
        cotangents = self.parts(x._replace(q=x.do, S=x.ds, z=x.dz))
        allowed = [
            allowed_errors(part, of, Rounding.of(dtype))
            for part, of in zip(self.parts(x), cotangents, strict=True)
        ]
        return {
            name: Bound(value, self.joined(name, [part[name] for part in allowed]))
            for name, value in exact.items()
        }


def with_gradients(x: LinearInputs, o: Tensor, S: Tensor, z: Tensor) -> Outputs:
    """Returns the results, and the gradients for the cotangents of x."""
    named = x.differentiable()
    results = (o, x.do), (S, x.ds.to(S.dtype)), (z, x.dz.to(z.dtype))
    outputs, cotangents = zip(*(one for one in results if one[0].requires_grad), strict=True)
    grads = torch.autograd.grad(outputs, list(named.values()), cotangents, materialize_grads=True)
    ends = {"o": o.detach(), "S_end": S.detach(), "z_end": z.detach()}
    return ends | {f"d{name}": g for name, g in zip(named, grads, strict=True)}


@functools.cache
def _expected(case: LinearCase, dtype: torch.dtype) -> Expected:
    """Reference values. Of plain torch, S_end and z_end are summed in float32 or float64, S_end of
    features in the dtype under test.

    In float32 dlog_decay is that of the definition, token by token. Like the kernels
    it sums <dS, S> + <dz, z>, two large terms that cancel if outputs are normalized. Over 1,100
    tokens and six seeds that costs 5e-5 to 1.2e-4, and the kernels 2e-5 to 6e-5. All weights at
    once need no states: 2e-6 to 1.6e-5.
    """
    x = case.inputs(dtype)
    real = accumulate_dtype(dtype)
    rounded = [_with_rounded_keys(case, part, real) for part in case.parts(x)]
    states = {
        "S_end": case.joined("S_end", [part.by_matrix()[1].detach() for part in rounded]),
        "z_end": case.by_matrix(x.to(real))["z_end"],
    }
    plain = case.by_matrix(x) | states
    if case.decay in ("token", "reset") and not case.steps and dtype == torch.float32:
        plain["dlog_decay"] = case.by_loop(x)["dlog_decay"]
    tokens = max(1, case.sequences * case.keys) if case.decay == "head" else 1
    return Expected(case.by_loop(x.to(torch.float64)), plain, counts={"dlog_decay": tokens})


def _with_rounded_keys(case: LinearCase, x: LinearPart, real: torch.dtype) -> LinearPart:
    """Features of keys in the dtype of the inputs, and the rest in that of sums. Steps of several
    tokens round decayed features: chunks on AMX round their operands."""
    phi = FEATURE_MAPS[x.feature_map]
    k, decay = phi(x.k), x.log_decay
    if case.steps and decay is not None:
        total = decay.double().cumsum(-1)
        k = k * (total[..., -1:] - total).exp().to(k.dtype)[..., None]
        assert x.S is not None
        x, decay = x._replace(S=x.S * total[..., -1, None, None].exp().to(real)), None
    return x._replace(
        q=phi(x.q).to(real), k=k.to(real), v=x.v.to(real), log_decay=decay, feature_map="identity"
    )


def steps_case(D: int, D_v: int) -> LinearCase:
    """Steps of 1, 32 and 7 tokens."""
    return LinearCase(name="steps", steps=(1, 32, 7), H_q=4, D=D, D_v=D_v, decay="token")


def _range(N: int) -> KeyRange:
    return KeyRange(start=(-3, 8), end=(N // 2, N // 2 + 29))


_PACKED = (70, 0, 1, 64, 131)

_STEPS: dict[str, dict[str, Any]] = {
    "steps": {},
    "steps-head": {"decay": "head", "normalize": False},
    "steps-token": {"decay": "token", "feature_map": "relu", "eps": 0.5},
    "steps-state": {"decay": "token", "state": True},
}
LINEAR_CASES: tuple[LinearCase, ...] = (
    LinearCase(name="plain"),
    LinearCase(name="chunk", N=64, D=16, D_v=16),
    LinearCase(name="chunk-and-one", N=65, D=17, D_v=5),
    LinearCase(name="chunks", N=200, D=33, D_v=40),
    LinearCase(name="full-width", N=90, D=64, D_v=32, mask=_range(90), decay="token", state=True),
    LinearCase(name="one-token", N=1, D=1, D_v=1),
    LinearCase(name="no-tokens", N=0, state=True),
    LinearCase(name="no-batch", B=0),
    LinearCase(name="wide", N=90, D=130, D_v=70),
    LinearCase(name="gqa", H_q=6, N=131, decay="head", state=True),
    LinearCase(name="mqa", H_q=3, H_kv=1, N=90),
    LinearCase(name="segments", B=1, H_q=1, H_kv=1, N=1100, D=5, D_v=6, state=True, decay="token"),
    LinearCase(name="segments-gqa", B=1, H_q=2, H_kv=1, N=1100, D=4, D_v=3, mask=_range(1100)),
    LinearCase(name="segments-all", B=1, H_q=1, H_kv=1, M=1040, N=1100, D=3, D_v=4, causal=False),
    LinearCase(name="relu", feature_map="relu", N=131, eps=0.5),
    LinearCase(name="identity", feature_map="identity", normalize=False, N=131),
    LinearCase(name="not-normalized", normalize=False, state=True, N=131),
    LinearCase(name="large-eps", eps=3.0, N=80),
    LinearCase(name="head-decay", decay="head", N=150, D_v=9),
    LinearCase(name="token-decay", decay="token", N=150, H_q=4, normalize=False),
    LinearCase(name="reset", decay="reset", N=150, state=True),
    LinearCase(name="state", state=True, N=100),
    LinearCase(name="padding", mask=KeyRange(end=(75, 104)), N=150),
    LinearCase(name="range", mask=_range(150), N=150, decay="token", state=True),
    LinearCase(name="range-decay", mask=_range(150), N=150, decay="head"),
    LinearCase(name="range-heads", mask=_range(66), N=66, H_q=4, D=20),
    LinearCase(name="all", causal=False, N=130),
    LinearCase(name="all-lengths", causal=False, M=7, N=150, H_q=4, state=True),
    LinearCase(name="all-padding", causal=False, M=90, N=150, mask=_range(150), normalize=False),
    LinearCase(name="transposed", layout="transposed", N=100, H_q=4),
    LinearCase(name="expanded", layout="expanded", N=100, decay="head"),
    LinearCase(name="packed", packed=_PACKED, trailing=4, H_q=4, D_v=5),
    LinearCase(name="packed-head", packed=_PACKED, trailing=4, H_q=4, D_v=5, decay="head",
               state=True),
    LinearCase(name="packed-token", packed=_PACKED, trailing=4, H_q=4, D_v=5, decay="token",
               normalize=False),
    LinearCase(name="packed-all", packed=_PACKED, trailing=4, H_q=4, D_v=5, causal=False,
               state=True),
    *(
        LinearCase(name=f"{name}-by-{sizes[0]}", steps=sizes, H_q=4, D=7, D_v=5, **options)
        for sizes in ((1,) * 40, (32, 8), (33, 7))
        for name, options in _STEPS.items()
    ),
)  # fmt: skip
