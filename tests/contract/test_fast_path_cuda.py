"""Fast path on a GPU, here with emulated kernels: the bits of the general path, and declined for
calls that need it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from tests.contract.test_fast_path import PassThroughMode, Subclass, assert_same
from tests.support import emulator
from tests.support.operators import assert_declined_if_changed
from tests.support.runtime import freed, misaligned
from transformer_kernels.backends.native import cuda_support
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.dispatch import fast_path
from transformer_kernels.masks.resolved import ALL_VISIBLE
from transformer_kernels.problem.layout import DENSE
from transformer_kernels.scores.options import PLAIN_SCORES

pytestmark = pytest.mark.skipif(
    emulator.unavailable_reason() is not None, reason=str(emulator.unavailable_reason())
)

B, H, M, N, D = 2, 2, 37, 41, 16
MAPPED = 1 << 25
"""Elements of a block that malloc maps: it takes more than 32 MiB, the largest one in the heap."""
MASKS = {
    "full": None,
    "empty": tk.Mask(),
    "causal": tk.Mask.causal(),
    "bottom-right": tk.Mask.causal(align="bottom_right"),
    "two-windows": tk.Mask.window(9, 3) & tk.Mask.causal(align="bottom_right"),
    "padding": tk.Mask.padding(torch.tensor([N, 5])) & tk.Mask.causal(),
    "dense": tk.Mask.dense(torch.arange(H * M * N).view(1, H, M, N) % 7 > 2),
}


@pytest.fixture(autouse=True)
def _installed() -> None:
    if emulator.emulated_by() is None:
        emulator.install()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records the results of the fast path; True = it ran the call."""
    answers: list[bool] = []
    attend = fast_path.plain_attention

    @functools.wraps(attend)
    def recorded(*arguments: Any, **options: Any) -> Tensor | str | None:
        o = attend(*arguments, **options)
        if options["backend"] == "cuda":
            answers.append(isinstance(o, Tensor))
        return o

    monkeypatch.setattr(fast_path, "plain_attention", recorded)
    return answers


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Records the results of direct calls: None, or the reason why they were declined."""
    results: list[str | None] = []
    library = cuda_support.libraries["cpu"]
    assert library.direct is not None

    def recorded(call: Callable[..., str | None]) -> Callable[..., str | None]:
        def record(*arguments: Any) -> str | None:
            results.append(call(*arguments))
            return results[-1]

        return record

    forward, backward = map(recorded, library.direct)
    monkeypatch.setattr(library, "direct", (forward, backward))
    return results


def qkv(dtype: torch.dtype = torch.float32, H_kv: int = H, D_v: int = D) -> list[Tensor]:
    """Transposed views of (B, length, heads, width), as a projection produces them."""
    shapes = ((B, M, H, D), (B, N, H_kv, D), (B, N, H_kv, D_v))
    return [mapped(torch.randn(s, dtype=dtype)).transpose(1, 2).requires_grad_() for s in shapes]


def mapped(x: Tensor) -> Tensor:
    """A copy at a high address, as tensors of a GPU have: calls with others are declined there.

    The heap of some Pythons starts at low ones.
    """
    return torch.empty(MAPPED, dtype=x.dtype).as_strided(x.shape, x.stride()).copy_(x)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    o = tk.attention(q, k, v, backend="cuda", **options)
    assert isinstance(o, Tensor)
    return o


def step(x: list[Tensor], **options: Any) -> list[Tensor]:
    """o and the gradients, with the random numbers of one seed; then a further random number."""
    torch.manual_seed(1)
    o = attention(*x, **options)
    after = torch.rand(())
    return [o, *torch.autograd.grad(o.square().sum(), x), after]


def general_step(x: list[Tensor], **options: Any) -> list[Tensor]:
    with PassThroughMode():
        return step(x, **options)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_bit_identical_to_the_general_path(
    dropout_p: float, mask: tk.Mask | None, calls: list[bool]
) -> None:
    x = qkv(torch.bfloat16)
    have = step(x, mask=mask, dropout_p=dropout_p)
    assert calls == [True]
    assert_same(have, general_step(x, mask=mask, dropout_p=dropout_p))
    assert calls == [True, False]
    torch.manual_seed(1)
    with torch.no_grad():
        o = attention(*x, mask=mask, dropout_p=dropout_p)
    assert_same([o], have[:1])
    assert not o.requires_grad
    assert calls == [True, False, True]
    explained = tk.explain(*x, mask=mask, dropout_p=dropout_p, backend="cuda")
    assert explained.general_path == ""


@pytest.mark.parametrize("given", [{"H_kv": 1}, {"D_v": 24}, {"dtype": torch.float16}], ids=str)
def test_sizes_and_dtypes(given: dict[str, Any], calls: list[bool]) -> None:
    x = qkv(**given)
    assert_same(step(x, scale=0.3), general_step(x, scale=0.3))
    assert calls == [True, False]


def test_sizes_scales_and_windows_are_distinguished(calls: list[bool]) -> None:
    """The cached problem of one call is not that of another one."""
    q, k, v = (x.detach() for x in qkv())
    for scale in (None, 0.3, 0.2):
        for right in (0, 1):
            for rows in (M, M - 1):
                x, mask = q[:, :, :rows], tk.Mask.window(None, right)
                have = attention(x, k, v, mask=mask, scale=scale)
                with PassThroughMode():
                    assert_same([have], [attention(x, k, v, mask=mask, scale=scale)])
    assert calls == [True, False] * 12


def test_a_gradient_of_one_input(calls: list[bool]) -> None:
    q, k, v = qkv()
    x = [q.detach(), k, v.detach()]
    (have,) = torch.autograd.grad(attention(*x, dropout_p=0.0).sum(), [k])
    with PassThroughMode():
        (want,) = torch.autograd.grad(attention(*x).sum(), [k])
    assert_same([have], [want])
    assert calls == [True, False]


def test_each_call_draws_another_seed() -> None:
    q, k, v = qkv()
    assert not torch.equal(attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype, calls: list[bool]) -> None:
    x = qkv(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have = step(x, dropout_p=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = general_step(x, dropout_p=0.3)
    assert have[0].dtype is torch.bfloat16
    assert_same(have, want)
    assert calls == [True, False]


def test_autocast_of_different_dtypes(calls: list[bool]) -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k.bfloat16(), v).dtype is torch.bfloat16
    assert calls == [False]


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:Input #")  # float32
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_second_order(dropout_p: float) -> None:
    """In float32, which the kernels support: gradients of gradients by the reference."""
    x = [torch.randn(1, 1, 3, 3, requires_grad=True) for _ in range(3)]

    def first_order(*x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attention(*x, mask=tk.Mask.causal(), dropout_p=dropout_p)

    assert gradgradcheck(first_order, x, eps=1e-2, atol=1e-2, rtol=5e-2, nondet_tol=1e-4)


@pytest.mark.parametrize("mask", ["full", "causal", "padding", "dense"])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing_with_one_pass_intercepted(inside: bool, mask: str) -> None:
    """Both paths save the same tensors."""
    x = qkv()
    options: dict[str, Any] = {"mask": MASKS[mask], "dropout_p": 0.3}
    want = step(x, **options)
    torch.manual_seed(1)
    with PassThroughMode() if inside else nullcontext():
        o = checkpoint(attention, *x, use_reentrant=False, **options)
    with nullcontext() if inside else PassThroughMode():
        have = torch.autograd.grad(o.square().sum(), x)
    assert_same([o, *have], want[:-1])


def test_lengths_modified_before_backward_raise() -> None:
    lengths = torch.tensor([5, 9])
    o = attention(*qkv(), mask=tk.Mask.padding(lengths))
    lengths.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_profiles_contain_the_operators(calls: list[bool], direct: list[str | None]) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(qkv())
    names = {str(event.name).rpartition("::")[2] for event in profiler.events()}
    assert {"attention_forward", "attention_backward"} <= names
    assert calls == [True]
    assert direct == []


STRIDED = "a tensor whose rows are not contiguous"
DIRECT: dict[str, tuple[dict[str, Any], list[str | None]]] = {
    "full": ({}, [None, None]),
    "causal": ({"mask": tk.Mask.causal()}, [None, None]),
    "dropout": ({"dropout_p": 0.3}, [None, None]),
    "padding": ({"mask": MASKS["padding"]}, [None, None]),
    "padding-dropout": ({"mask": MASKS["padding"], "dropout_p": 0.3}, [None, None]),
    "dense": ({"mask": MASKS["dense"]}, ["a block mask"]),
}
"""Calls, and the results of their direct calls. Element masks take the operators."""


@pytest.mark.parametrize("name", DIRECT)
def test_direct_calls(name: str, direct: list[str | None]) -> None:
    options, results = DIRECT[name]
    step(qkv(), **options)
    assert direct == results
    with torch.autocast("cpu", torch.bfloat16):
        step(qkv(torch.bfloat16), **options)
    assert direct == 2 * results


def test_direct_calls_are_declined(direct: list[str | None]) -> None:
    q, k, v = qkv()
    attention(q, mapped(k.detach().mT.contiguous().mT), v)
    assert direct == [STRIDED]
    attention(q, k, qkv(D_v=24)[2])
    assert direct[1:] == ["v has another width than q"]
    for do in (torch.ones(()).expand(B, H, M, D), torch.randn(D, M, H, B).permute(3, 2, 1, 0)):
        have = torch.autograd.grad(attention(q, k, v), (q, k, v), do)
        with PassThroughMode():
            want = torch.autograd.grad(attention(q, k, v), (q, k, v), do)
        assert_same(list(have), list(want))
    assert direct[2:] == [None, STRIDED, STRIDED] * 2  # the mode is off in the backward pass


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"mask": MASKS["padding"]},
    "softcap": {"softcap": 2.0},
    "alibi": {"bias": tk.alibi(torch.tensor([0.5, 0.25]))},
    "bias": {"bias": torch.arange(M * N).view(M, N) % 5 / 5},
    "relative": {"relative": tk.relative_bias(torch.ones(H, 5), lowest=-2)},
    "keys": {"relative": tk.relative_keys(torch.ones(H, 5, D), lowest=-2)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_direct_backward_passes_with_options(
    name: str, direct: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the operator, whatever options the call has that need no gradient."""
    x = qkv()
    have = step(x, **OPTIONS[name])
    assert direct[-1] is None
    monkeypatch.setattr(cuda_support.libraries["cpu"], "direct", None)
    assert_same(have, step(x, **OPTIONS[name]))


def test_direct_calls_in_deterministic_mode(direct: list[str | None]) -> None:
    x = qkv()
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(step(x), step(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert direct == [None] * 4


@pytest.mark.parametrize("damage", [freed, misaligned, functools.partial(Tensor.to, device="meta")])
def test_direct_calls_decline_tensors_without_memory(damage: Callable[[Tensor], Tensor]) -> None:
    calls = cuda_support.libraries["cpu"].direct
    assert calls is not None
    q, k, v = (torch.randn(B, H, N, D) for _ in range(3))
    o, row_stats = torch.empty_like(q), torch.empty(2, B, H, N)
    options = (PLAIN_SCORES._replace(dropout_p=0.5, seed=torch.tensor(3)), ALL_VISIBLE, DENSE)
    gradients = map(torch.empty_like, (q, k, v))
    assert_declined_if_changed(calls[0], (q, k, v, *options, o, row_stats), damage)
    backward = (q, k, v, *options, o, row_stats, torch.randn_like(o), *gradients, True)
    assert_declined_if_changed(calls[1], backward, damage)


INTERCEPTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "function-mode": PassThroughMode,
    "default-device": lambda: torch.device("cpu"),
    "forward-mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("context", INTERCEPTED.values(), ids=INTERCEPTED)
def test_declines_where_calls_may_be_replaced(
    context: Callable[[], AbstractContextManager[Any]], calls: list[bool]
) -> None:
    x = qkv()
    with context():
        attention(*x)
    torch.vmap(attention)(*(y[None] for y in x))
    assert True not in calls


def valid() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    """Valid calls that the fast path declines: q, k and v, options."""
    q, k, v = qkv()
    with torch.inference_mode():
        inference = k.detach().clone()
    return {
        "subclass": ([q.as_subclass(Subclass), k, v], {}),
        "no-queries": ([q[:, :, :0], k, v], {}),
        "inference": ([q, inference, v], {}),
        "int-scale": ([q, k, v], {"scale": 1}),
        "zero-scale": ([q, k, v], {"scale": -0.0}),
    }


@pytest.mark.parametrize("name", valid())
def test_declines_other_valid_calls(name: str, calls: list[bool]) -> None:
    (q, k, v), options = valid()[name]
    have = attention(q, k, v, **options)
    assert True not in calls
    assert tk.explain(q, k, v, **options, backend="cuda").general_path != ""
    want = tk.attention(q, k, v, **options, backend="reference")
    assert_same_function(have.as_subclass(Tensor), want.as_subclass(Tensor))


def freed_lengths() -> tk.Mask:
    lengths = torch.tensor([5, 9])
    mask = tk.Mask.padding(lengths)
    lengths.untyped_storage().resize_(0)
    return mask


def invalid() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Calls with one wrong argument."""
    q, k, v = (x.detach() for x in qkv())
    return {
        "dimensions": ([q[0], k, v], {}),
        "widths": ([q, k[..., :8], v], {}),
        "lengths": ([q, k, v[:, :, 1:]], {}),
        "heads": ([q[:, :1], k, v], {}),
        "batches": ([q[:1], k, v], {}),
        "dtypes": ([q, k.half(), v], {}),
        "integers": ([q.int(), k.int(), v.int()], {}),
        "devices": ([q, k.to("meta"), v], {}),
        "sparse": ([q, k.contiguous().to_sparse(), v], {}),
        "freed": ([q, k, freed(v)], {}),
        "misaligned": ([q, misaligned(k), v], {}),
        "float64": ([q.double(), k.double(), v.double()], {}),
        "scale": ([q, k, v], {"scale": float("nan")}),
        "scale-type": ([q, k, v], {"scale": [1.0]}),
        "dropout_p": ([q, k, v], {"dropout_p": 1.5}),
        "dropout_p-nan": ([q, k, v], {"dropout_p": float("nan")}),
        "mask-type": ([q, k, v], {"mask": torch.ones(M, N).bool()}),
        "mask-lengths": ([q, k, v], {"mask": tk.Mask.padding(torch.tensor([5]))}),
        "mask-device": ([q, k, v], {"mask": tk.Mask.padding(torch.ones(B, device="meta").int())}),
        "mask-freed": ([q, k, v], {"mask": freed_lengths()}),
    }


@pytest.mark.parametrize("name", invalid())
def test_errors_are_those_of_the_general_path(name: str, calls: list[bool]) -> None:
    x, options = invalid()[name]
    with pytest.raises((TypeError, ValueError)) as have:
        attention(*x, **options)
    assert calls == [False]
    with pytest.raises(have.type) as want, PassThroughMode():
        attention(*x, **options)
    assert str(have.value) == str(want.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_declines_nested_tensors(calls: list[bool]) -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(TypeError, match="q must be a strided tensor, got a nested tensor"):
        attention(torch.nested.nested_tensor([q[0], q[1]]), k, v)
    assert calls == [False]


def test_tensors_on_a_cpu_need_the_emulator(calls: list[bool]) -> None:
    x = qkv()
    attention(*x)
    before = emulator.emulated_by()
    emulator.emulate(None)
    try:
        with pytest.raises(ValueError, match="needs CUDA tensors"):
            attention(*x)
    finally:
        emulator.emulate(before)
    assert calls == [True, False]


def test_other_backends_are_not_replaced(calls: list[bool]) -> None:
    for backend in ("auto", "cpu", "reference"):
        tk.attention(*qkv(), backend=backend)
    assert calls == []


@pytest.mark.parametrize("grouped", [True, False])
def test_grouped_heads_on_request(grouped: bool) -> None:
    q, k, v = qkv(H_kv=1)
    o = fast_path.plain_attention(q, k, v, grouped=grouped, backend="cuda")
    assert isinstance(o, Tensor) == grouped
