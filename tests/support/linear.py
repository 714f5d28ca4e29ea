"""Cases of linear attention, their inputs, and the same results by a loop and by a matrix."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import NAMES, dtypes_of
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.linear import operators
from transformer_kernels.linear.backends import LINEAR_BACKENDS
from transformer_kernels.linear.feature_maps import FEATURE_MAPS
from transformer_kernels.linear.types import Inputs, Options
from transformer_kernels.problem.types import accumulate_dtype

LINEAR_NAMES = tuple(backend.name for backend in LINEAR_BACKENDS if backend.name in NAMES)
"""Backends of linear attention that run on CPU tensors."""
LINEAR_WAYS = tuple((name, dtype) for name in LINEAR_NAMES for dtype in dtypes_of(name))
LINEAR_FLOAT64 = tuple(name for name, dtype in LINEAR_WAYS if dtype == torch.float64)


def widest(backend: str) -> torch.dtype:
    """Returns float64, or float32 for a backend without it."""
    return dtypes_of(backend)[0]


def linear_arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> dict[str, Any]:
    """Arguments of the forward operators, by name in their order."""
    names = (field.name for field in operators.FIELDS)
    return dict(zip(names, operators.pack(Inputs(q, k, v), Options("elu")), strict=True)) | given


def operators_of(backend: Any, device: str = "cpu") -> list[Any]:
    """Returns the operators of a backend: of a forward pass, of a backward pass, and of steps."""
    namespace = backend.operators(torch.device(device))
    return [getattr(namespace, name).default for name in backend.names]


@dataclass(frozen=True)
class LinearCase:
    """Sizes and options of one call. `decay` is "head", "token" or "reset"; `keys` is "padding" or
    "range"; `layout` is "bhld", "blhd" or "expanded" (k and v shared by the batch)."""

    name: str
    B: int = 2
    H_q: int = 2
    H_kv: int = 2
    M: int = 0
    N: int = 70
    D: int = 8
    D_v: int = 8
    feature_map: str = "elu"
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    decay: str = ""
    state: bool = False
    keys: str = ""
    layout: str = "bhld"

    def __str__(self) -> str:
        return self.name

    @property
    def queries(self) -> int:
        return self.N if self.causal else self.M or self.N

    def mask(self, device: str = "cpu") -> tk.Mask | None:
        if not self.keys:
            return None
        entry = torch.arange(self.B, device=device)
        end = entry * 29 + self.N // 2
        if self.keys == "padding":
            return tk.Mask.padding(end)
        return tk.Mask.key_range(entry * 11 - 3, end)

    def visible(self) -> Tensor:
        """Visible keys (B, N)."""
        mask = self.mask()
        if mask is None:
            return torch.ones(self.B, self.N, dtype=torch.bool)
        return mask.constraints[0].visible(1, self.N, torch.device("cpu"))[:, 0, 0]

    def options(self) -> dict[str, Any]:
        return {
            "feature_map": self.feature_map,
            "causal": self.causal,
            "normalize": self.normalize,
            "eps": self.eps,
        }


LINEAR_CASES = (
    LinearCase("plain"),
    LinearCase("chunk", N=64, D=16, D_v=16),
    LinearCase("chunk-and-one", N=65, D=17, D_v=5),
    LinearCase("chunks", N=200, D=33, D_v=40),
    LinearCase("full-width", N=90, D=64, D_v=32, keys="range", decay="token", state=True),
    LinearCase("one-token", N=1, D=1, D_v=1),
    LinearCase("no-tokens", N=0, state=True),
    LinearCase("no-batch", B=0),
    LinearCase("wide", N=90, D=130, D_v=70),
    LinearCase("gqa", H_q=6, N=131, decay="head", state=True),
    LinearCase("mqa", H_q=3, H_kv=1, N=90),
    LinearCase("segments", B=1, H_q=1, H_kv=1, N=1100, D=5, D_v=6, state=True, decay="token"),
    LinearCase("segments-gqa", B=1, H_q=2, H_kv=1, N=1100, D=4, D_v=3, keys="range"),
    LinearCase("segments-all", B=1, H_q=1, H_kv=1, M=1040, N=1100, D=3, D_v=4, causal=False),
    LinearCase("relu", feature_map="relu", N=131, eps=0.5),
    LinearCase("identity", feature_map="identity", normalize=False, N=131),
    LinearCase("not-normalized", normalize=False, state=True, N=131),
    LinearCase("large-eps", eps=3.0, N=80),
    LinearCase("head-decay", decay="head", N=150, D_v=9),
    LinearCase("token-decay", decay="token", N=150, H_q=4, normalize=False),
    LinearCase("reset", decay="reset", N=150, state=True),
    LinearCase("state", state=True, N=100),
    LinearCase("padding", keys="padding", N=150),
    LinearCase("range", keys="range", N=150, decay="token", state=True),
    LinearCase("range-decay", keys="range", N=150, decay="head"),
    LinearCase("range-heads", keys="range", N=66, H_q=4, D=20),
    LinearCase("all", causal=False, N=130),
    LinearCase("all-lengths", causal=False, M=7, N=150, H_q=4, state=True),
    LinearCase("all-padding", causal=False, M=90, N=150, keys="range", normalize=False),
    LinearCase("transposed", layout="blhd", N=100, H_q=4),
    LinearCase("expanded", layout="expanded", N=100, decay="head"),
)


def linear_case(name: str) -> LinearCase:
    return next(case for case in LINEAR_CASES if case.name == name)


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

    def to(self, to: torch.dtype | str) -> LinearInputs:
        """Returns leaves in another dtype, or on another device."""
        return LinearInputs._make(None if x is None else _leaf(x.detach().to(to)) for x in self)


def _leaf(x: Tensor) -> Tensor:
    return x.requires_grad_(x.is_floating_point())


def linear_inputs(case: LinearCase, dtype: torch.dtype) -> LinearInputs:
    """Random inputs; hidden keys and values, and their decay, are NaN."""
    torch.manual_seed(5)
    real = accumulate_dtype(dtype)

    def rows(heads: int, length: int, width: int, *, shared: bool = False) -> Tensor:
        if case.layout == "blhd":
            return torch.randn(case.B, length, heads, width).to(dtype).transpose(1, 2)
        batch = 1 if shared else case.B
        return torch.randn(batch, heads, length, width).to(dtype).expand(case.B, -1, -1, -1)

    shared = case.layout == "expanded"
    q = rows(case.H_q, case.queries, case.D)
    k = rows(case.H_kv, case.N, case.D, shared=shared)
    v = rows(case.H_kv, case.N, case.D_v, shared=shared)
    decay = None
    if case.decay == "head":
        decay = -torch.rand(case.H_kv).to(real)
    elif case.decay:
        decay = -torch.rand(case.B, case.H_kv, case.N).to(real) * min(0.4, 28 / max(1, case.N))
        if case.decay == "reset":
            decay[:, :, [0, 40, 41, 100]] = -math.inf
    hidden = ~case.visible()[:, None]
    if case.keys:
        k, v = (x.masked_fill(hidden[..., None], math.nan) for x in (k, v))
        if decay is not None and decay.dim() == 3:
            decay = decay.masked_fill(hidden, math.nan)
    S = torch.randn(case.B, case.H_kv, case.D, case.D_v).to(real)
    z = torch.rand(case.B, case.H_kv, case.D).to(real) + 1
    do = torch.randn(case.B, case.H_q, case.queries, case.D_v).to(dtype)
    dS, dz = torch.randn_like(S), torch.randn_like(z)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    decay = None if decay is None else _leaf(decay)
    initial = (_leaf(S), _leaf(z)) if case.state else (None, None)
    return LinearInputs(q, k, v, decay, initial[0], initial[1], do, dS, dz)


Outputs = dict[str, Tensor]


def linear_by_backend(
    case: LinearCase, x: LinearInputs, backend: str, device: str = "cpu"
) -> Outputs:
    """Results and gradients of `linear_attention` on a device, by name, on the CPU."""
    x = x if device == "cpu" else x.to(device)
    state = None if x.S is None or x.z is None else tk.LinearState(x.S, x.z)
    o, end = tk.linear_attention(
        x.q, x.k, x.v, mask=case.mask(device), log_decay=x.log_decay, initial_state=state,
        return_state=True, backend=backend, **case.options(),
    )  # fmt: skip
    return {name: y.cpu() for name, y in _with_gradients(x, o, *end).items()}


def _with_gradients(x: LinearInputs, o: Tensor, S: Tensor, z: Tensor) -> Outputs:
    named = x.differentiable()
    cotangents = [x.do, x.ds.to(S.dtype), x.dz.to(z.dtype)]
    grads = torch.autograd.grad([o, S, z], list(named.values()), cotangents, materialize_grads=True)
    ends = {"o": o.detach(), "S_end": S.detach(), "z_end": z.detach()}
    return ends | {f"d{name}": g for name, g in zip(named, grads, strict=True)}


def _features(case: LinearCase, x: LinearInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """phi(q), phi(k), v and the decay of every token, for every query head; hidden ones are 0."""
    phi, heads = FEATURE_MAPS[case.feature_map], case.H_q // case.H_kv
    hidden = ~case.visible()[:, None]
    q, k = phi(x.q), phi(x.k.masked_fill(hidden[..., None], 0))
    k = k.masked_fill(hidden[..., None], 0).repeat_interleave(heads, dim=1)
    v = x.v.masked_fill(hidden[..., None], 0).repeat_interleave(heads, dim=1)
    if x.log_decay is None:
        return q, k, v, None
    decay = x.log_decay if x.log_decay.dim() == 3 else x.log_decay[None, :, None]
    decay = decay.expand(case.B, case.H_kv, case.N).masked_fill(hidden, 0)
    return q, k, v, decay.repeat_interleave(heads, dim=1)


def _initial(case: LinearCase, x: LinearInputs) -> tuple[Tensor, Tensor]:
    heads = case.H_q // case.H_kv
    if x.S is None or x.z is None:
        zeros = x.q.new_zeros(case.B, case.H_q, case.D, case.D_v)
        return zeros, zeros.sum(-1)
    return x.S.repeat_interleave(heads, dim=1), x.z.repeat_interleave(heads, dim=1)


def _mapped(case: LinearCase, x: Tensor) -> Tensor:
    return FEATURE_MAPS[case.feature_map](x.detach()).requires_grad_()


def linear_by_loop(case: LinearCase, x: LinearInputs) -> Outputs:
    """The definition: one token after another, with every key first if not causal."""
    q, k, v, decay = _features(case, x)
    S, z = _initial(case, x)
    outputs = [q[:, :, :0] @ S]

    def attend(i: int) -> None:
        o = torch.einsum("bhd,bhdc->bhc", q[:, :, i], S)
        if case.normalize:
            o = o / ((q[:, :, i] * z).sum(-1, keepdim=True) + case.eps)
        outputs.append(o[:, :, None])

    for j in range(case.N):
        if decay is not None:
            kept = decay[:, :, j, None].exp()
            S, z = S * kept[..., None], z * kept
        S = S + k[:, :, j, :, None] * v[:, :, j, None, :]
        z = z + k[:, :, j]
        if case.causal:
            attend(j)
    for i in range(0 if case.causal else case.queries):
        attend(i)
    heads = case.H_q // case.H_kv
    return _with_gradients(x, torch.cat(outputs, dim=2), S[:, ::heads], z[:, ::heads])


def linear_by_matrix(case: LinearCase, x: LinearInputs) -> Outputs:
    """Plain torch: all weights at once, in the dtype of the inputs."""
    q, k, v, decay = _features(case, x)
    dtype, one = x.q.dtype, slice(None, None, case.H_q // case.H_kv)  # query head per key head
    S, z = (state.to(dtype) for state in _initial(case, x))
    weights, start, end = q @ k.mT, torch.ones(1, 1, 1).to(dtype), torch.ones(1, 1, 1).to(dtype)
    if case.causal:
        total = x.q.new_zeros(1, 1, case.N, dtype=torch.float64)
        if decay is not None:
            total = decay.double().clamp(min=-800).cumsum(-1)
        later = torch.ones(case.N, case.N, dtype=torch.bool).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -math.inf)
        weights, start = weights * between.exp().to(dtype), total.exp().to(dtype)
        end = (total[..., -1:] - total).exp().to(dtype)
    started = q * start[..., None]
    o = weights @ v + started @ S
    if case.normalize:
        o = o / (weights.sum(-1, keepdim=True) + started @ z[..., None] + case.eps)
    k = (k * end[..., None])[:, one]
    S = (S * start[..., -1:, None])[:, one] if case.N else S[:, one]
    z = (z * start[..., -1:])[:, one] if case.N else z[:, one]
    return _with_gradients(x, o, S + k.mT @ v[:, one], z + k.sum(-2))


class LinearExpected(NamedTuple):
    """Reference values of a case."""

    exact: Outputs
    """the reference backend in float64"""
    plain: Outputs
    """Plain torch in the dtype under test; S_end and z_end summed in float32 or float64, S_end of
    features in the dtype under test.

    In float32 and float64, dlog_decay is that of the definition, token by token. Like the kernels
    it sums <dS, S> + <dz, z>, two large terms that cancel if outputs are normalized. Over 1,100
    tokens and six seeds that costs 5e-5 to 1.2e-4, and the kernels 2e-5 to 6e-5. All weights at
    once need no states: 2e-6 to 1.6e-5.
    """
    tokens: int

    def check(self, got: Outputs) -> None:
        """Raises AssertionError if a result violates the tolerance rule."""
        assert got.keys() == self.exact.keys()
        for name, value in got.items():
            exact, plain = self.exact[name], self.plain[name]
            if name == "dlog_decay" and value.dim() == 1:  # a sum over tokens: compare the mean
                value, exact, plain = (x / self.tokens for x in (value, exact, plain))
            assert_within_rule(name, value, exact, plain)


@functools.cache
def linear_expected(case: LinearCase, dtype: torch.dtype) -> LinearExpected:
    """Reference values of a case in this dtype."""
    x = linear_inputs(case, dtype)
    exact = linear_by_backend(case, x.to(torch.float64), "reference")
    summed = linear_by_backend(case, x, "reference")
    rounded = x._replace(q=_mapped(case, x.q), k=_mapped(case, x.k))
    of_rounded = linear_by_backend(replace(case, feature_map="identity"), rounded, "reference")
    states = {"S_end": of_rounded["S_end"], "z_end": summed["z_end"]}
    plain = linear_by_matrix(case, x) | states
    if case.decay not in ("", "head") and dtype in (torch.float32, torch.float64):
        plain["dlog_decay"] = linear_by_loop(case, x)["dlog_decay"]
    return LinearExpected(exact, plain, max(1, case.B * case.N))


def assert_linear_case(
    case: LinearCase, dtype: torch.dtype, backend: str, device: str = "cpu"
) -> None:
    """Asserts the tolerance rule for all results and gradients."""
    expected = linear_expected(case, dtype)
    expected.check(linear_by_backend(case, linear_inputs(case, dtype), backend, device))


def assert_steps_continue(D: int, D_v: int, backend: str, device: str = "cpu") -> None:
    """Asserts that `linear_attention_decode` continues a sequence, by 1, 32 and 7 tokens."""
    q, k, v = (torch.randn(2, heads, 40, width) for heads, width in ((4, D), (2, D), (2, D_v)))
    decay = -torch.rand(2, 2, 40)
    exact, end = tk.linear_attention(
        q.double(), k.double(), v.double(), log_decay=decay.double(), return_state=True
    )
    state = tk.LinearState(*(torch.zeros(x.shape, device=device) for x in end))
    q, k, v, decay = (x.to(device) for x in (q, k, v, decay))
    for rows in (slice(0, 1), slice(1, 33), slice(33, 40)):
        o = tk.linear_attention_decode(
            q[:, :, rows], k[:, :, rows], v[:, :, rows], state,
            log_decay=decay[:, :, rows], backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(o.cpu().double(), exact[:, :, rows], rtol=1e-5, atol=1e-5)
    for got, expected in zip(state, end, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)
