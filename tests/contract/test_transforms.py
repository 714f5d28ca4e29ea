"""torch.func, vmap and forward mode over every operator, compiled or not: right, and fused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import transformer_kernels as tk
from tests.support.backends import COMPILED_BACKENDS, NAMES, operators_of
from tests.support.linear import LINEAR_NAMES
from tests.support.operators import BACKWARD, FORWARD, operator_arguments, operators_run_by
from tests.support.oracle import plain_attention
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.integrations.flash_attn import flash_attn_func

H, L, D = 2, 5, 3
LINEAR = "transformer_kernels::linear_forward", "transformer_kernels::linear_backward"
CU_SEQLENS = torch.tensor([0, 2, 5], dtype=torch.int32)
Function = Callable[[Tensor], Tensor]
Transform = Callable[[Function], Function]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masks": {"mask": tk.Mask.causal() & tk.Mask.padding(torch.tensor([4]))},
    "dense": {"mask": tk.Mask.dense(torch.ones(L, L).tril(2).bool()), "softcap": 0.9},
    "bias": {"bias": torch.linspace(-1, 1, L * L, dtype=torch.float64).view(L, L)},
    "alibi": {"bias": tk.alibi(torch.tensor([0.5, 0.25], dtype=torch.float64))},
    "table": {"relative": tk.relative_bias(torch.eye(H, 3, dtype=torch.float64), lowest=-1)},
    "dropout": {"dropout_p": 0.4, "seed": 7},
    "sinks": {"sinks": torch.tensor([0.5, -0.5], dtype=torch.float64)},
}


def dense(backend: str, **options: Any) -> Function:
    return lambda x: tk.attention(x.sin(), x * 0.5, x + 1, backend=backend, **options)


def varlen(backend: str) -> Function:
    def call(x: Tensor) -> Tensor:
        y = x[0].transpose(0, 1)
        return tk.attention_varlen(y.sin(), y, y + 1, CU_SEQLENS, max_seqlen_q=3, backend=backend)

    return call


def linear(backend: str) -> Function:
    return lambda x: tk.linear_attention(x.sin(), x * 0.5, x + 1, backend=backend)


def linear_varlen(backend: str) -> Function:
    def call(x: Tensor) -> Tensor:
        y = x[0].transpose(0, 1)
        return tk.linear_attention_varlen(y.sin(), y, y + 1, CU_SEQLENS, backend=backend)

    return call


def drop_in(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x.sin(), x * 0.5, x + 1, is_causal=True)


def flash_attn(x: Tensor) -> Tensor:
    y = x.transpose(1, 2)
    o: Tensor = flash_attn_func(y.sin(), y * 0.5, y + 1, causal=True)
    return o.transpose(1, 2)


_MODULE = nn.MultiheadAttention(D, 1, batch_first=True, dtype=torch.float64).requires_grad_(False)
"""Compiled code with parameters that require grad has no forward mode, whatever it computes."""


def module(x: Tensor) -> Tensor:
    o: Tensor = _MODULE(x[0], x[0], x[0], need_weights=False)[0]
    return o


def module_in_plain_torch(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return module(x)


def with_lse(attention: Callable[..., Any], **options: Any) -> Function:
    def call(x: Tensor) -> Tensor:
        o, lse = attention(x.sin(), x * 0.5, x + 1, **options)
        sum_: Tensor = o + lse[..., None]
        return sum_

    return call


_CAUSAL = dense("reference", mask=tk.Mask.causal())
CALLS: dict[str, tuple[Function, Function]] = {
    **{name: (dense("cpu", **x), dense("reference", **x)) for name, x in OPTIONS.items()},
    **{
        name: (with_lse(tk.attention, return_lse=True, backend=name), with_lse(plain_attention))
        for name in ("cpu", "reference")
    },
    "varlen": (varlen("cpu"), varlen("reference")),
    "linear": (linear("cpu"), linear("reference")),
    "linear-varlen": (linear_varlen("cpu"), linear_varlen("reference")),
    "flash_attn": (flash_attn, _CAUSAL),
    "drop-in": (drop_in, _CAUSAL),
    "module": (module, module_in_plain_torch),
}
"""Functions of x (1, H, L, D), and the same in plain torch."""


def loss(function: Function) -> Function:
    return lambda x: function(x).square().sum()


def _doubled(x: Tensor) -> Tensor:
    return torch.stack([x, 2 * x])


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: grad(loss(f)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](f(x))[0],
    "jacrev": jacrev,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(loss(f)),
    "grad of grad": lambda f: grad(loss(grad(loss(f)))),
    "vmap": lambda f: lambda x: vmap(f)(_doubled(x)),
    "vmap of grad": lambda f: lambda x: vmap(grad(loss(f)))(_doubled(x)),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(_doubled(x)).square().sum()),
}


def transformed(
    function: Function, names: Sequence[str] = tuple(TRANSFORMS)
) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda x: {name: TRANSFORMS[name](function)(x) for name in names}


def tangent(function: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found: Tensor | None = forward_ad.unpack_dual(
            function(forward_ad.make_dual(x, x.cos()))
        ).tangent
    assert found is not None
    return found


def assert_right(
    ours: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype = torch.float64
) -> None:
    for name, want in exact.items():
        assert want.abs().max() > 0.01, name
        try:
            assert_same_function(ours[name], want, dtype=dtype)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def x_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(1, H, L, D, dtype=dtype)


@pytest.mark.parametrize("name", CALLS)
def test_transforms(name: str) -> None:
    function, exact = CALLS[name]
    x = x_of()
    with tk.enabled():
        ours = transformed(function)(x) | {"dual": tangent(function, x)}
    assert_right(ours, transformed(exact)(x) | {"dual": tangent(exact, x)})


def assert_compiled(function: Function, exact: Function, names: Sequence[str], mode: str) -> None:
    """In one graph, and a dual level around compiled code. Inductor drops tangents in its own
    kernels, those of sin too."""
    x = x_of()
    has_dual = mode != "inductor"
    torch.compiler.reset()
    with tk.enabled():
        call = transformed(function, names)
        ours = torch.compile(call, backend=mode, fullgraph=True)(x)
        if has_dual:
            ours["dual"] = tangent(torch.compile(function, backend=mode, fullgraph=True), x)
    wanted = transformed(exact, names)(x)
    assert_right(ours, wanted | {"dual": tangent(exact, x)} if has_dual else wanted)


@pytest.mark.quick
def test_compiled_derivatives_are_not_zero() -> None:
    assert_compiled(*CALLS["masks"], ["grad", "jvp"], "aot_eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_transforms(name: str, mode: str) -> None:
    assert_compiled(*CALLS[name], list(TRANSFORMS), mode)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["masks", "varlen", "linear-varlen", "drop-in"])
def test_transforms_by_inductor(name: str) -> None:
    """torch 2.13 fails to compile the scatter in the Hessian of packed sequences, with an error."""
    names = [x for x in TRANSFORMS if (name, x) != ("varlen", "hessian")]
    assert_compiled(*CALLS[name], names, "inductor")


@pytest.mark.exhaustive
def test_compiled_gradients_of_options() -> None:
    """Dynamo does not see inside torch.func that an option requires grad."""
    x = x_of()
    tensors = {
        "bias": torch.randn(L, L, dtype=torch.float64),
        "slopes": torch.rand(H, dtype=torch.float64),
        "table": torch.randn(H, 3, dtype=torch.float64),
        "sinks": torch.randn(H, dtype=torch.float64),
    }

    def gradients(backend: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        def call(t: dict[str, Tensor]) -> Tensor:
            relative = tk.relative_bias(t["table"], lowest=-1)
            one = dense(backend, bias=t["bias"], relative=relative)
            other = dense(backend, bias=tk.alibi(t["slopes"]), sinks=t["sinks"])
            return (one(x).square() + other(x).square()).sum()

        return grad(call)

    torch.compiler.reset()
    compiled = torch.compile(gradients("cpu"), backend="aot_eager", fullgraph=True)
    assert_right(compiled(tensors), gradients("reference")(tensors))


OTHERS = [name for name in NAMES if name not in ("cpu", "reference")]


@pytest.mark.parametrize(
    ("call", "backend"),
    [
        *((one, name) for one in (dense, varlen) for name in OTHERS),
        *((linear, name) for name in LINEAR_NAMES),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_transforms_of_other_backends(call: Callable[..., Function], backend: str) -> None:
    x, names = x_of(torch.float32), ["vjp", "jacrev", "vmap", "vmap of grad", "jvp", "hessian"]
    exact = transformed(call("reference"), names)(x.double())
    assert_right(transformed(call(backend), names)(x), exact, torch.float32)


@pytest.mark.parametrize("name", ["plain", "linear", "varlen", "drop-in"])
def test_first_order_transforms_run_the_kernels(name: str) -> None:
    """And once for all examples, if they are not packed."""
    function, x = CALLS[name][0], x_of()
    forward, backward = LINEAR if name == "linear" else (FORWARD, BACKWARD)
    for transform in ("grad", "vjp", "vmap", "vmap of grad", "grad of vmap"):
        call = TRANSFORMS[transform](function)
        with tk.enabled():
            ran = operators_run_by(functools.partial(call, x))
        assert ran[forward] > 0, transform
        assert (ran[backward] > 0) == (transform != "vmap"), transform
        assert ran["aten::softmax"] + ran["aten::logsumexp"] == 0, transform


def test_operators_have_derivatives() -> None:
    """Calls past the package's functions are differentiable; decoding raises an error."""
    x = x_of().requires_grad_()
    forward = operators_of("cpu").attention_forward
    o, row_stats, _ = forward(**operator_arguments(x.sin(), x * 0.5, x + 1))
    (dx,) = torch.autograd.grad(o.square().sum() + row_stats[0].sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)

    def exact(x: Tensor) -> Tensor:
        o, lse = tk.attention(x.sin(), x * 0.5, x + 1, return_lse=True, backend="reference")
        return o.square().sum() + lse.sum()

    assert_same_function(dx, grad(exact)(x))
    assert_same_function(ddx, grad(lambda x: grad(exact)(x).square().sum())(x))
    cache_seqlens = torch.tensor([L], dtype=torch.int32)
    arguments = operator_arguments(x, x, x, cache_seqlens=cache_seqlens)
    with pytest.raises(NotImplementedError, match=r"no derivative: call it under torch.no_grad"):
        forward(**arguments)
    with torch.no_grad():
        assert forward(**arguments)[0].shape == x.shape


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_decoding_has_no_silent_gradient(mode: str) -> None:
    """Compiled code does not see that a tensor requires grad inside torch.func; operators do."""
    x = x_of(torch.float32)
    state = tk.LinearState(torch.zeros(1, H, D, D), torch.zeros(1, H, D))

    def decode(x: Tensor) -> Tensor:
        return tk.attention_decode(x, x, x, torch.tensor([L]), backend="cpu").sum()

    def step(x: Tensor) -> Tensor:
        return tk.linear_attention_decode(x, x, x, state, backend="cpu").sum()

    for function in (decode, step):
        torch.compiler.reset()
        with pytest.raises((ValueError, RuntimeError), match=r"no (derivative|backward)|in-place"):
            torch.compile(grad(function), backend=mode)(x)


def test_explain_inside_a_transform() -> None:
    reports: dict[str, str] = {}

    def explained(name: str) -> Function:
        def call(x: Tensor) -> Tensor:
            reports[name] = str(tk.explain(x, x, x))
            return tk.attention(x, x, x)

        return call

    x = x_of()
    for name in ("grad", "vmap", "jvp", "grad of grad"):
        TRANSFORMS[name](explained(name))(x)
    assert {name: report.splitlines()[1].split()[1] for name, report in reports.items()} == {
        "grad": "cpu", "vmap": "cpu", "jvp": "reference", "grad of grad": "reference",
    }  # fmt: skip
    assert "of higher order" in reports["jvp"]


def by_example(function: Callable[..., Tensor], *batched: Tensor) -> Tensor:
    return torch.stack([function(*examples) for examples in zip(*batched, strict=True)])


B, EXAMPLES = 2, 3
_USED = torch.tensor([4, 2])
BATCHED: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "query": ((B, H, L, D), lambda x, q: tk.attention(q, x, x)),
    "value": ((B, H, L, 2), lambda x, v: tk.attention(x, x, v)),
    "bias": ((H, 1, L), lambda x, b: tk.attention(x, x, x, bias=b)),
    "bias by entry": ((B, 1, L, L), lambda x, b: tk.attention(x, x, x, bias=b)),
    "slopes": ((B, H), lambda x, s: tk.attention(x, x, x, bias=tk.alibi(s.abs()))),
    "table": ((H, 3), lambda x, t: tk.attention(x, x, x, relative=tk.relative_bias(t, lowest=-1))),
    "sinks": ((H,), lambda x, s: tk.attention(x, x, x, sinks=s)),
    "dense mask": ((L, L), lambda x, m: tk.attention(x, x, x, mask=tk.Mask.dense(m > 0))),
    "layout": ((H, 3, 3), lambda x, m: tk.attention(x, x, x, mask=tk.Mask.block_sparse(m > 0, 2))),
    "lengths": ((B,), lambda x, n: tk.attention(x, x, x, mask=tk.Mask.padding(_lengths(n)))),
    "segments": ((B, L), lambda x, n: tk.attention(x, x, x, mask=_segments(n))),
    "seed": ((), lambda x, n: tk.attention(x, x, x, dropout_p=0.5, seed=_lengths(n))),
    "cache": ((B, H, L, D), lambda x, k: tk.attention_decode(x[:, :, :1], k, x, _USED)),
    "cache_seqlens": ((B,), lambda x, n: tk.attention_decode(x[:, :, :1], x, x, _lengths(n))),
    "block_table": ((B, 1), lambda x, n: tk.attention_decode(x[:, :, :1], x, x, _USED, _pages(n))),
    "cu_seqlens": ((), lambda x, n: _packed(x, n, tk.attention_varlen)),
    "linear cu_seqlens": ((), lambda x, n: _packed(x, n, tk.linear_attention_varlen)),
    "log_decay": ((B, H, L), lambda x, g: tk.linear_attention(x, x, x, log_decay=-g.abs())),
    "linear key": ((B, H, L, D), lambda x, k: tk.linear_attention(x, k, x, causal=False)),
}


def _lengths(x: Tensor) -> Tensor:
    """Integers from 1 to L."""
    return (x.abs() * 7).long() % L + 1


def _pages(x: Tensor) -> Tensor:
    return (x > 0).int()


def _segments(x: Tensor) -> tk.Mask:
    return tk.Mask.segments(_pages(x), _pages(x))


def _packed(x: Tensor, n: Tensor, function: Callable[..., Tensor]) -> Tensor:
    rows = x[0].transpose(0, 1)
    end = _lengths(n)
    cu_seqlens = torch.stack([torch.zeros_like(end), end // 2, end]).int()
    longest = {"max_seqlen_q": L} if function is tk.attention_varlen else {}
    return function(rows, rows, rows, cu_seqlens, **longest)


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_over_each_argument(name: str) -> None:
    """With another argument that the examples share, or that is batched in its last dimension."""
    shape, function = BATCHED[name]
    x = torch.randn(EXAMPLES, B, H, L, D, dtype=torch.float64)
    y = torch.randn(EXAMPLES, *shape, dtype=torch.float64)
    shared = vmap(function, in_dims=(None, 0))(x[0], y)
    assert_same_function(shared, by_example(lambda y: function(x[0], y), y))
    both = vmap(function, in_dims=(-1, 0))(x.movedim(0, -1), y)
    assert_same_function(both, by_example(function, x, y))
    inner = vmap(lambda x: vmap(lambda y: function(x, y))(y))(x)
    assert_same_function(inner, by_example(lambda x: by_example(lambda y: function(x, y), y), x))


OPTIONS_WITH_GRADIENT: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    **{
        f"bias {shape}": (shape, BATCHED["bias"][1])
        for shape in ((L, L), (1, H, 1, L), (B, 1, L, L))
    },
    "slopes": ((H,), BATCHED["slopes"][1]),
    "table": BATCHED["table"],
    "log_decay": ((H,), BATCHED["log_decay"][1]),
}


@pytest.mark.parametrize("name", OPTIONS_WITH_GRADIENT)
def test_per_sample_gradients_of_options(name: str) -> None:
    shape, function = OPTIONS_WITH_GRADIENT[name]
    x = torch.randn(EXAMPLES, B, H, L, D, dtype=torch.float64)
    option = torch.rand(EXAMPLES, *shape, dtype=torch.float64)

    def gradient(x: Tensor, option: Tensor) -> Tensor:
        gradient: Tensor = grad(lambda option: function(x, option).square().sum())(option)
        return gradient

    shared = vmap(gradient, in_dims=(0, None))(x, option[0])
    assert_same_function(shared, by_example(lambda x: gradient(x, option[0]), x))
    assert_same_function(vmap(gradient)(x, option), by_example(gradient, x, option))


@pytest.mark.parametrize("name", ["query", "table", "log_decay"])
def test_vmap_over_no_examples(name: str) -> None:
    shape, function = BATCHED[name]
    x = torch.randn(B, H, L, D, dtype=torch.float64)
    got = vmap(function, in_dims=(None, 0))(x, torch.randn(0, *shape, dtype=torch.float64))
    assert got.shape == (0, *function(x, torch.zeros(shape, dtype=torch.float64)).shape)


def test_vmap_over_drop_in_and_its_randomness() -> None:
    x = x_of().expand(EXAMPLES, 1, H, L, D)

    def dropped(x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    with tk.enabled():
        same = vmap(dropped, randomness="same")(x)
        different = vmap(dropped, randomness="different")(x)
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(dropped)(x)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])


def test_per_sample_gradients_of_a_module() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    samples = torch.randn(EXAMPLES, L, 4, dtype=torch.float64)

    def sample_loss(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        o: Tensor = functional_call(layer, dict(parameters), (x[None],))
        return o.square().sum()

    with tk.enabled():
        got = vmap(grad(sample_loss), in_dims=(None, 0))(parameters, samples)
    for n, x in enumerate(samples):
        exact = torch.autograd.grad(sample_loss(parameters, x), list(parameters.values()))
        assert_same_function([g[n] for g in got.values()], list(exact))


@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_batched_gradients(backend: str) -> None:
    """torch.autograd.grad with is_grads_batched, with and without another order."""
    x = x_of(torch.float32).requires_grad_()
    o = dense(backend)(x)
    cotangents = torch.randn(EXAMPLES, *o.shape)
    exact = by_example(lambda c: torch.autograd.grad(o, x, c, retain_graph=True)[0], cotangents)
    for create_graph in (False, True):
        (dx,) = torch.autograd.grad(
            o, x, cotangents, retain_graph=True, is_grads_batched=True, create_graph=create_graph
        )
        assert_same_function(dx.detach(), exact)
        assert dx.requires_grad == create_graph


def test_vmap_over_lengths_needs_bounds_and_caches_of_its_own() -> None:
    x, ends = torch.randn(EXAMPLES, L, H, D), torch.tensor([[0, 2], [0, 5], [0, 1]]).int()
    with pytest.raises(ValueError, match="max_seqlen_q must be an int, got None, and cu_seqlens_q"):
        vmap(lambda x, ends: tk.attention_varlen(x, x, x, ends))(x, ends)
    cache, new = torch.zeros(1, H, L, D), torch.randn(EXAMPLES, 1, H, 1, D)

    def append(cache: Tensor, new: Tensor, length: Tensor) -> Tensor:
        cache = cache.clone()
        tk.append_to_cache(cache, cache.clone(), new, new, length)
        return cache

    with pytest.raises(ValueError, match="k_cache must be batched inside vmap"):
        vmap(append, in_dims=(None, 0, 0))(cache, new, ends[:, 1:])
    caches = cache.expand(EXAMPLES, *cache.shape)
    got = vmap(append)(caches, new, ends[:, 1:])
    assert torch.equal(got, by_example(append, caches, new, ends[:, 1:]))


def test_autocast_casts_a_bias_in_another_half_precision() -> None:
    x, bias = torch.randn(1, H, L, D), torch.randn(L, L).half()
    with torch.autocast("cpu", torch.bfloat16):
        o = tk.attention(x, x, x, bias=bias)
        with tk.enabled():
            replaced = scaled_dot_product_attention(x, x, x, bias)
    half = x.bfloat16()
    assert torch.equal(o, tk.attention(half, half, half, bias=bias.bfloat16()))
    assert torch.equal(o, replaced)
    with pytest.raises(TypeError, match=r"bias must be float32, got torch\.float16"):
        tk.attention(x, x, x, bias=bias)
