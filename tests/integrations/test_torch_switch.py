"""`enable` replaces torch's attention by these kernels in all threads; `disable` brings it back."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as imported_before

import transformer_kernels as tk
from building.extension import ROOT
from tests.support.backends import needs_varlen, not_in_2_11
from tests.support.operators import BACKWARD, FORWARD, operators_run_by
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.common import torch_private
from transformer_kernels.integrations import torch_devices, torch_switch
from transformer_kernels.integrations.torch_switch import FLASH_NAME

Qkv = tuple[Tensor, Tensor, Tensor]
Q, K, V = torch.randn(2, 2, 7, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 6)


@pytest.fixture
def switched() -> Iterator[None]:
    with tk.enabled():
        yield


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    tk.disable()


def leaves() -> Qkv:
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    return q, k, v


def call_torchs() -> Tensor:
    return functional.scaled_dot_product_attention(Q, K, V)


def is_on() -> bool:
    return FORWARD in operators_run_by(call_torchs)


def test_enable_and_disable_are_idempotent() -> None:
    assert not is_on()
    tk.enable()
    tk.enable()
    assert operators_run_by(call_torchs)[FORWARD] == 1
    for _ in range(2):
        tk.disable()
        assert not is_on()


def test_enabled_restores_the_previous_state() -> None:
    with pytest.raises(KeyError), tk.enabled():
        raise KeyError
    assert not is_on()
    tk.enable()
    with tk.enabled():
        pass
    assert is_on()


def test_blocks_and_enable_are_independent() -> None:
    with tk.enabled():
        tk.disable()
        assert is_on()
        tk.enable()
    assert is_on()
    tk.disable()
    assert not is_on()


@pytest.mark.usefixtures("switched")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_sdpa_kernel_is_honoured(mode: Callable[[], Any]) -> None:
    with mode():
        assert operators_run_by(call_torchs)[FORWARD] == 1
        with sdpa_kernel(SDPBackend.MATH):
            ran = operators_run_by(call_torchs)
            assert FORWARD not in ran
            assert "aten::_scaled_dot_product_attention_math" in ran
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert is_on()
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            assert is_on()
        with (
            sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
            pytest.raises(RuntimeError, match="No viable backend"),
        ):
            call_torchs()
    assert is_on()


@needs_varlen
def test_varlen_attn_runs_on_cpus_while_the_switch_is_on() -> None:
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)

    def attend() -> Tensor:
        o = varlen_attn(Q[0], Q[0], Q[0], cu_seqlens, cu_seqlens, 2, 2)
        assert isinstance(o, Tensor)
        return o

    for _ in range(2):
        with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
            attend()
        with tk.enabled():
            assert operators_run_by(attend)[FORWARD] == 1


def test_torchs_registry_of_implementations() -> None:
    assert FLASH_NAME in list_flash_attention_impls()
    activate_flash_attention_impl(FLASH_NAME)
    try:
        assert current_flash_attention_impl() == FLASH_NAME
        assert operators_run_by(call_torchs)[FORWARD] == 1
    finally:
        restore_flash_attention_impl()
    assert not is_on()


def forget_registration() -> None:
    """Removes what `enable` keeps registered for other threads; here they call nothing."""
    if (library := torch_switch._SWITCH.library) is not None:
        torch_private.remove_library(library)
        torch_switch._SWITCH.library = None


def test_devices_whose_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu/test_drop_in.py runs the replacement on a CUDA device."""
    replaced = {"cpu"}
    monkeypatch.setattr(torch_devices, "REPLACED", replaced)
    for name in ("CudaBackend", "TritonBackend"):
        backend = SimpleNamespace(unavailable_reason=lambda: "no such device")
        monkeypatch.setattr(torch_devices, name, lambda backend=backend: backend)
    torch_devices.find()
    assert replaced == {"cpu"}
    backend.unavailable_reason = lambda: None
    torch_devices.find()
    assert replaced == {"cpu", "cuda"}
    forget_registration()
    try:
        with tk.enabled():
            for key in ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(
                    "aten::scaled_dot_product_attention", key
                )
    finally:
        forget_registration()


@not_in_2_11
def test_distributed_tensors_run_the_operators() -> None:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(Q, init_device_mesh("cpu", (1,)), [Shard(1)])
        expected = functional.scaled_dot_product_attention(x, x, x)
        with tk.enabled():
            o = functional.scaled_dot_product_attention(x, x, x)
            for tensors in ((x, x, x), (nn.Parameter(Q), K, V)):
                attend = partial(functional.scaled_dot_product_attention, *tensors)
                assert FORWARD in operators_run_by(attend)
    finally:
        distributed.destroy_process_group()
    assert isinstance(o, DTensor)
    assert_same_function(o.full_tensor(), expected.full_tensor())  # type: ignore[attr-defined]


@pytest.mark.usefixtures("switched")
def test_earlier_imports_are_replaced_too() -> None:
    assert operators_run_by(lambda: imported_before(Q, K, V))[FORWARD] == 1


@pytest.mark.usefixtures("switched")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(7, 5) < 0.7},
        {"attn_mask": torch.randn(7, 5)},
        {"dropout_p": 0.5},
        {"scale": 0.2},
    ],
    ids=["plain", "causal", "bool", "float", "dropout", "scale"],
)
def test_training_runs_the_operators(options: dict[str, Any]) -> None:
    tensors = leaves()
    torch.manual_seed(3)
    expected = tk.scaled_dot_product_attention(*tensors, **options)

    def step() -> None:
        torch.manual_seed(3)
        o = functional.scaled_dot_product_attention(*tensors, **options)
        assert torch.equal(o, expected)
        torch.autograd.grad(o.square().sum(), tensors)

    ran = operators_run_by(step)
    assert (ran[FORWARD], ran[BACKWARD]) == (1, 1)


MASKED = torch.tensor([[77], [20]]) <= torch.arange(77)
DIFFUSERS: dict[str, tuple[int, int, int, Tensor | None]] = {
    "unet": (8, 8, 49, None),
    "unet-text": (8, 8, 77, (-10000.0 * MASKED).view(2, 1, 1, 77).repeat_interleave(8, dim=1)),
    "dit-text": (4, 32, 77, ~MASKED[:, None, None]),
    "vae": (1, 512, 49, None),
}
"""Heads, width, keys and mask of calls of diffusers 0.42, with 49 queries."""


@each("name", DIFFUSERS)
def test_calls_of_diffusers_run_the_operators(name: str) -> None:
    """Heads are views of projections; the mask is additive or bool, for every query alike."""
    heads, width, N, mask = DIFFUSERS[name]
    inputs = [torch.randn(2, n, heads * width, requires_grad=True) for n in (49, N, N)]

    def step() -> tuple[Tensor, ...]:
        query, key, value = (x.view(2, -1, heads, width).transpose(1, 2) for x in inputs)
        o = functional.scaled_dot_product_attention(
            query=query, key=key, value=value, attn_mask=mask, dropout_p=0.0, is_causal=False
        )
        o = o.transpose(1, 2).reshape(2, -1, heads * width)
        return o.detach(), *torch.autograd.grad(o.square().sum(), inputs)

    expected = step()
    with tk.enabled(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_function(step(), expected)
        ran = operators_run_by(step)
    assert (ran[FORWARD], ran[BACKWARD]) == (1, 1)


@pytest.mark.usefixtures("switched")
def test_second_order_through_the_switch() -> None:
    tensors = [x.double().requires_grad_() for x in (Q[:1, :1], K[:1, :1], V[:1, :1])]
    assert torch.autograd.gradgradcheck(
        functional.scaled_dot_product_attention, tensors, fast_mode=True
    )


@pytest.mark.usefixtures("switched")
def test_autocast_through_the_switch() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert operators_run_by(call_torchs)[FORWARD] == 1
        assert call_torchs().dtype == torch.bfloat16


@pytest.mark.usefixtures("switched")
def test_compiled_training_with_dropout() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5).square().sum()

    tensors = leaves()
    loss(*tensors)
    ran = operators_run_by(lambda: torch.autograd.grad(loss(*tensors), tensors))
    assert (ran[FORWARD], ran[BACKWARD]) == (1, 1)


UNSUPPORTED: dict[str, tuple[Qkv, dict[str, Any]]] = {
    "the widths D and D_v must be at least 1": ((Q, K, V[..., :0]), {}),
    "query's heads must be a positive": ((Q[:, :0], K[:, :0], V[:, :0]), {}),
    "key and value must share heads": ((Q, K, V[:, :1]), {"enable_gqa": True}),
    "dropout_p must be between 0 and 1, got -0.1": ((Q, K, V), {"dropout_p": -0.1}),
    "dropout_p must be finite, got nan": ((Q, K, V), {"dropout_p": float("nan")}),
    "scale must be finite, got nan": ((Q, K, V), {"scale": float("nan")}),
    "scale must be finite, got inf": ((Q, K, V), {"scale": float("inf")}),
}


@each("reason", UNSUPPORTED)
def test_unsupported_calls_fall_back_to_torch_with_a_warning(reason: str) -> None:
    tensors, options = UNSUPPORTED[reason]
    expected = functional.scaled_dot_product_attention(*tensors, **options)
    with pytest.raises(ValueError, match=reason):
        tk.scaled_dot_product_attention(*tensors, **options)
    with (
        tk.enabled(),
        pytest.warns(UserWarning, match=f"falling back to torch's own attention: {reason}"),
    ):
        got = functional.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.usefixtures("switched")
def test_supported_calls_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_torchs()


def test_a_block_lasts_while_other_threads_end_theirs() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with tk.enabled():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    try:
        with tk.enabled():
            pass
        tk.disable()
        assert is_on()
    finally:
        leave.set()
        thread.join()
    assert not is_on()


@needs_varlen
def test_a_registration_kept_for_other_threads_runs_torchs_attention() -> None:
    def step() -> tuple[Tensor, ...]:
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o).cumsum(-1)))

    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, K.flip(-1)))
    expected = step()
    try:
        with tk.enabled():
            pass
        assert torch_switch._SWITCH.library is not None
        ran = operators_run_by(lambda: functional.scaled_dot_product_attention(Q, K, K))
        assert FORWARD not in ran
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran
        assert all(map(torch.equal, step(), expected))
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            functional.scaled_dot_product_attention(Q, K.double(), V)
        with pytest.raises(NotImplementedError, match="has no kernel for the CPU"):
            varlen_attn(Q[0], Q[0], Q[0], torch.tensor([0, 2]), None, 2, 2)
    finally:
        leave.set()
        thread.join()


SWITCH_PROGRAM = """
import sys
import threading
import time
import torch
import transformer_kernels as tk

def registered():
    name, keys = "aten::scaled_dot_product_attention", ("CPU", "AutogradCPU")
    return {torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys}

assert registered() == {False}
with tk.enabled():
    assert registered() == {True}
assert registered() == {False}  # the only thread

torch.set_num_threads(1)
sys.setswitchinterval(1e-4)
x = torch.randn(1, 2, 16, 16)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
done, errors, calls = threading.Event(), [], [0] * 4

def attend(n):
    leaf = x.clone().requires_grad_(n % 2 == 1)
    try:
        while not done.is_set():
            o = torch.nn.functional.scaled_dot_product_attention(leaf, leaf, leaf)
            assert (o - expected).abs().max() < 1e-5
            calls[n] += 1
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=attend, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for flip in range(1000):
    if flip % 2:
        tk.enable()
        time.sleep(0)
        tk.disable()
    else:
        with tk.enabled():
            time.sleep(0)
done.set()
for thread in threads:
    thread.join()
assert not errors, errors[0]
assert min(calls) > 0, calls
assert registered() == {True}
with tk.enabled():
    pass
assert registered() == {False}
"""


def test_threads_attend_while_the_switch_flips() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SWITCH_PROGRAM], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
