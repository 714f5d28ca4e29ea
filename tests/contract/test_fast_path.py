"""CPU fast path: bit-identical to the operators, and declined for calls that need them."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradgradcheck
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from tests.support.tiers import each
from transformer_kernels.backends.native import direct
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.dispatch import fast_path

B, H, M, N, D = 2, 4, 67, 71, 16
MASKS = {
    "full": None,
    "causal": tk.Mask.causal(),
    "bottom-right": tk.Mask.causal(align="bottom_right"),
    "window": tk.Mask.window(9, 3),
    "bottom-right-window": tk.Mask.window(9, 3, align="bottom_right"),
    "unseen-keys": tk.Mask.window(5, -60),
    "far": tk.Mask.window(1 << 61, -(1 << 61)),
    "padding": tk.Mask.padding(torch.tensor([N, 5])),
    "key-range": tk.Mask.key_range(torch.tensor([3, 70]), torch.tensor([60, 2])),
    "padded-causal": tk.Mask.padding(torch.tensor([0, 33])) & tk.Mask.causal(),
    "segments": tk.Mask.segments(*((torch.arange(n) // 30).repeat(B, 1) for n in (M, N))),
    "dense": tk.Mask.dense(torch.arange(H * M * N).view(1, H, M, N) % 7 > 2),
    "dense-keys": tk.Mask.dense((torch.arange(B * N) % 5 > 0).view(B, 1, 1, N)),
    "dense-across": tk.Mask.dense((torch.arange(N * M) % 3 > 0).view(N, M).mT),
    "blocks": tk.Mask.block_sparse(torch.arange(H * 25).view(H, 5, 5) % 3 > 0, 16),
    "two-windows": tk.Mask.window(9, 3) & tk.Mask.causal(align="bottom_right"),
    "wide-window": tk.Mask.window(2**62 + 1, -1),
    "crossed-window": tk.Mask.window(None, -(2**62) - 1),
    "short-lengths": tk.Mask.padding(torch.tensor([5, 9], dtype=torch.int32)),
    "short-segments": tk.Mask.segments(
        *((torch.arange(n) // 30).repeat(B, 1).int() for n in (M, N))
    ),
    "merged": tk.Mask.padding(torch.tensor([40, N]))
    & tk.Mask.key_range(torch.tensor([3, 70]), torch.tensor([60, N]))
    & tk.Mask.dense((torch.arange(N) % 3 > 0).view(1, N))
    & tk.Mask.dense((torch.arange(M) % 5 > 0).view(M, 1))
    & tk.Mask.block_sparse(torch.arange(25).view(1, 5, 5) % 3 > 0, 16)
    & tk.Mask.block_sparse(torch.arange(9).view(1, 3, 3) % 2 > 0, 24),
    "everything": tk.Mask.causal()
    & tk.Mask.padding(torch.tensor([N, 33]))
    & tk.Mask.segments(*((torch.arange(n) // 40).repeat(B, 1) for n in (M, N)))
    & tk.Mask.dense(torch.arange(M * N).view(M, N) % 7 > 0)
    & tk.Mask.block_sparse(torch.arange(25).view(1, 5, 5) % 3 > 0, 16),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class RecordingMode(TorchDispatchMode):
    """Dispatch mode that records the names of all operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


class PassThroughMode(TorchFunctionMode):
    """Function mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class Subclass(Tensor):
    """A subclass that changes nothing."""


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list of the results of all later direct calls; True = the kernels ran."""
    answers: list[bool] = []

    def recorded(function: Callable[..., str | None]) -> Callable[..., str | None]:
        def call(*arguments: Any) -> str | None:
            reason = function(*arguments)
            answers.append(reason is None)
            return reason

        return call

    for name in ("launch_forward", "launch_backward"):
        monkeypatch.setattr(direct, name, recorded(getattr(direct, name)))
    return answers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return record_launches(monkeypatch)


def qkv(dtype: torch.dtype = torch.float32, H_kv: int = H, D_v: int = D) -> list[Tensor]:
    """Transposed views of (B, length, heads, width), as a projection produces them."""
    shapes = ((B, M, H, D), (B, N, H_kv, D), (B, N, H_kv, D_v))
    return [torch.randn(s, dtype=dtype).transpose(1, 2).requires_grad_() for s in shapes]


def by_operators(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    with RecordingMode() as recording:
        result = step(q, k, v, **options)
    assert {"attention_forward", "attention_backward"} <= recording.names
    return result


def step(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    """o and the gradients of q, k and v."""
    o = tk.attention(q, k, v, **options)
    return [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]


def assert_same(have: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(have, want, strict=True):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("H_kv", [H, 2])
def test_bit_identical_to_the_operators(
    H_kv: int, dtype: torch.dtype, mask: tk.Mask | None, poisoned: None, calls: list[bool]
) -> None:
    q, k, v = qkv(dtype, H_kv)
    have = step(q, k, v, mask=mask)
    assert calls == [True, True]
    assert_same(have, by_operators(q, k, v, mask=mask))
    with torch.no_grad():
        assert_same([tk.attention(q, k, v, mask=mask)], have[:1])
    assert calls == [True, True, True]
    assert tk.explain(q, k, v, mask=mask).general_path == ""


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "sliced": lambda x: torch.stack([x, x], dim=2).transpose(1, 2)[:, 1],
    "reversed-dims": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "expanded": lambda x: x[:1, :1].expand_as(x),
    "one-query": lambda x: x[:, :, :1],
}


@each("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    x = [layout(x.detach()).requires_grad_() for x in qkv()]
    have, want = step(*x, scale=0.3), by_operators(*x, scale=0.3)
    for one, other in zip(have, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_do_may_have_any_strides(calls: list[bool]) -> None:
    q, k, v = qkv()
    for do in (torch.ones(()).expand(B, H, M, D), torch.randn(D, M, H, B).permute(3, 2, 1, 0)):
        have = torch.autograd.grad(tk.attention(q, k, v), (q, k, v), do)
        with RecordingMode():
            want = torch.autograd.grad(tk.attention(q, k, v), (q, k, v), do)
        assert_same(list(have), list(want))
    assert calls == [True] * 4


def test_only_the_backward_pass_intercepted(calls: list[bool]) -> None:
    q, k, v = qkv()
    o, recording = tk.attention(q, k, v), RecordingMode()
    with recording:
        have = torch.autograd.grad(o.square().sum(), (q, k, v))
    assert "attention_backward" in recording.names
    assert calls == [True]
    do = 2 * o.detach()
    want = torch.autograd.grad(tk.attention(q, k, v), (q, k, v), do.as_subclass(Subclass))
    assert calls == [True, True, False]
    assert_same(list(have), [x.as_subclass(Tensor) for x in want])


def test_declines_where_direct_calls_are_unavailable(
    monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    monkeypatch.setattr(direct, "AVAILABLE", False)
    q, k, v = (x.detach() for x in qkv())
    tk.attention(q, k, v)
    tk.attention_decode(q, k, v, torch.tensor([9, 5]))
    assert calls == []


@contextmanager
def forward_mode() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


INTERCEPTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch-mode": RecordingMode,
    "function-mode": PassThroughMode,
    "default-device": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "forward-mode": forward_mode,
    "profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("context", INTERCEPTED.values(), ids=INTERCEPTED)
def test_interceptable_calls_use_the_operators(
    context: Callable[[], AbstractContextManager[Any]], calls: list[bool]
) -> None:
    q, k, v = qkv()
    with context():
        tk.attention(q, k, v)
        assert "intercept" in tk.explain(q, k, v).general_path
        with torch.no_grad():
            tk.attention(q, k, v)
            tk.scaled_dot_product_attention(q, k, v)
            tk.attention_decode(q, k, v, torch.tensor([9, 5]))
    assert calls == []
    tk.attention(q, k, v)
    assert calls == [True]


def test_transforms_use_the_general_path(calls: list[bool]) -> None:
    x = [x.detach() for x in qkv()]
    torch.vmap(tk.attention)(*(x[None] for x in x))
    torch.func.grad(lambda q: tk.attention(q, *x[1:]).sum())(x[0])
    assert calls == []


@pytest.mark.filterwarnings("ignore")
def test_traces_contain_the_operator(calls: list[bool]) -> None:
    x = [x.detach() for x in qkv()]
    traced = torch.jit.trace(lambda *x: tk.attention(*x), x, check_trace=False)
    assert "transformer_kernels::attention_forward" in str(traced.graph)
    assert calls == []


def declined() -> dict[str, Any]:
    """Valid calls that the fast path does not support: (q, k, v, options)."""
    q, k, v = (x.detach() for x in qkv())
    ids = (torch.arange(N) // 9)[None].expand(B, N)

    return {
        "subclass": (q.as_subclass(Subclass), k, v, {}),
        "lazy-negation": (torch._neg_view(q), k, v, {}),
        "no-queries": (q[:, :, :0], k, v, {}),
        "narrow-values": (q, k, v[..., :3], {}),
        "far-lengths": (q, k, v, {"mask": tk.Mask.padding(torch.tensor([5, 0, 9, 0])[::2])}),
        "far-segments": (q, k, v, {"mask": tk.Mask.segments(ids[:, :M], ids)}),
        "lse": (q, k, v, {"return_lse": True}),
        "softcap": (q, k, v, {"softcap": 3.0}),
        "dropout": (q, k, v, {"dropout_p": 0.5}),
        "sinks": (q, k, v, {"sinks": torch.zeros(H)}),
        "bias": (q, k, v, {"bias": torch.zeros(M, N)}),
    }


@pytest.mark.parametrize("name", declined())
def test_other_valid_calls_use_the_general_path(name: str, calls: list[bool]) -> None:
    q, k, v, options = declined()[name]
    with torch.random.fork_rng():
        have = tk.attention(q, k, v, **options)
    assert True not in calls
    assert tk.explain(q, k, v, **options).general_path != ""
    want = tk.attention(q, k, v, **options, backend="reference")
    for x, y in zip([*have], [*want], strict=True):
        assert_same_function(x.as_subclass(Tensor), y.as_subclass(Tensor))


GENERAL: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "dropout": {"dropout_p": 0.5, "seed": 1},
    "alibi": {"bias": tk.alibi(torch.ones(H)), "mask": tk.Mask.causal()},
    "bias": {"bias": torch.ones(M, N)},
}


@pytest.mark.parametrize("name", GENERAL)
def test_backward_passes_of_general_calls_are_direct(name: str, calls: list[bool]) -> None:
    q, k, v = qkv()
    have = step(q, k, v, **GENERAL[name])
    assert calls == [True]
    assert_same(have, by_operators(q, k, v, **GENERAL[name]))
    assert calls == [True]


def test_packed_sequences_use_the_operators(calls: list[bool]) -> None:
    q, k, v = (torch.randn(9, H, D, requires_grad=True) for _ in range(3))
    tk.attention_varlen(q, k, v, torch.tensor([0, 4, 9])).sum().backward()
    assert calls == []


def test_parameters_use_the_fast_path(calls: list[bool]) -> None:
    q, k, v = (nn.Parameter(x.detach()) for x in qkv())
    assert type(tk.attention(q, k, v)) is Tensor
    with torch.inference_mode():
        assert tk.attention(q, k, v).is_inference()
    assert calls == [True, True]


def test_sdpa_requires_enable_gqa(calls: list[bool]) -> None:
    q, k, v = qkv(H_kv=2)
    with pytest.raises(ValueError, match="enable_gqa=True allows a multiple"):
        tk.scaled_dot_product_attention(q, k, v)
    assert calls == [False]
    tk.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert calls == [False, True]


@pytest.mark.parametrize("mask", ["none", "causal", (M, N), (B, 1, 1, N), (B, H, M, N)], ids=str)
def test_enabled_sdpa_uses_the_fast_path(mask: Any, calls: list[bool]) -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {"is_causal": mask == "causal"}
    if isinstance(mask, tuple):
        options["attn_mask"] = torch.arange(torch.Size(mask).numel()).view(mask) % 3 > 0
    want = nn.functional.scaled_dot_product_attention(q, k, v, **options)
    with tk.enabled():
        o = nn.functional.scaled_dot_product_attention(q, k, v, **options)
    assert calls == [True]
    assert_same_function(o, want)


def small_mask() -> tk.Mask:
    triangle = torch.ones(1, 2, 3, 3, dtype=torch.bool).tril()
    return tk.Mask.padding(torch.tensor([2])) & tk.Mask.dense(triangle)


def test_second_order() -> None:
    """With masks made in inference mode, too."""
    with torch.inference_mode():
        inference = small_mask()
    x = [torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for mask in (tk.Mask.causal(), small_mask(), inference):
        assert gradgradcheck(functools.partial(tk.attention, mask=mask), x)


@pytest.mark.parametrize("mask", ["full", "key-range", "everything"])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing_with_one_pass_intercepted(inside: bool, mask: str) -> None:
    """Both paths save the same tensors."""
    q, k, v = qkv()
    options: dict[str, Any] = {"mask": MASKS[mask]}
    with PassThroughMode() if inside else nullcontext():
        o = checkpoint(tk.attention, q, k, v, use_reentrant=False, **options)
    with nullcontext() if inside else PassThroughMode():
        have = torch.autograd.grad(o.square().sum(), (q, k, v))
    assert_same([o, *have], step(q, k, v, **options))


def test_saved_tensors_support_hooks_and_version_checks() -> None:
    q, k, v = qkv()
    with save_on_cpu():
        o = tk.attention(q, k, v)
    assert_same([o, *torch.autograd.grad(o.square().sum(), (q, k, v))], step(q, k, v))
    o = tk.attention(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_lengths_modified_before_backward_raise() -> None:
    lengths = torch.tensor([5, 9])
    o = tk.attention(*qkv(), mask=tk.Mask.padding(lengths))
    lengths.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_int32_lengths_are_copied(calls: list[bool]) -> None:
    """The backward pass uses the lengths of the forward pass, on both paths."""
    q, k, v = qkv()
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    want = step(q, k, v, mask=tk.Mask.padding(lengths.clone()))
    for context in (nullcontext(), RecordingMode()):
        o = tk.attention(q, k, v, mask=tk.Mask.padding(lengths))
        lengths.fill_(3)
        with context:
            have = torch.autograd.grad(o.square().sum(), (q, k, v))
        assert_same([o, *have], want)
        lengths.copy_(torch.tensor([5, 9]))
    assert calls == [True] * 5


MISFITS = {
    "few-lengths": tk.Mask.padding(torch.tensor([5])),
    "many-lengths": tk.Mask.padding(torch.tensor([5, 9, 9])),
    "segments": tk.Mask.segments(torch.zeros(B, M).long()),
    "many-segments": tk.Mask.segments(torch.zeros(3, M).long(), torch.zeros(3, N).long()),
    "many-positions": tk.Mask.positions(torch.zeros(1, M).long(), torch.zeros(B, 3, N).long()),
    "dense": tk.Mask.dense(torch.ones(M, M).bool()),
    "few-blocks": tk.Mask.block_sparse(torch.ones(5, 4).bool(), 16),
    "few-rows-of-blocks": tk.Mask.block_sparse(torch.ones(4, 5).bool(), 16),
    "many-blocks": tk.Mask.block_sparse(torch.ones(5, 6).bool(), 16),
    "blocks-of-heads": tk.Mask.block_sparse(torch.ones(2, 5, 5).bool(), 16),
}


@pytest.mark.parametrize("mask", MISFITS.values(), ids=MISFITS)
def test_masks_of_wrong_sizes_raise(
    mask: tk.Mask, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extension checks all sizes itself, too, before it reads memory."""
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"mask's .* must be|mask must broadcast"):
        tk.attention(q, k, v, mask=mask)
    assert calls == []
    for constraint in mask.constraints:
        monkeypatch.setattr(type(constraint), "check", lambda *arguments: None)
    assert isinstance(fast_path.plain_attention(q, k, v, mask=mask), str)
    assert calls == [False]


def test_output_is_freed_without_garbage_collection() -> None:
    gc.disable()
    try:
        o = tk.attention(*qkv())
        reference = weakref.ref(o)
        del o
        assert reference() is None
    finally:
        gc.enable()


def test_concurrent_callers_are_independent() -> None:
    """Each call has its own workspace."""
    x = [torch.randn(1, 2, 256, 32) for _ in range(3)]
    want = tk.attention(*x)
    wrong: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            o = tk.attention(*x)
            if not torch.equal(o, want):
                wrong.append(o)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
