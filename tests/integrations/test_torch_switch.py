"""`enable` replaces torch's attention by these kernels, and `disable` brings it back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
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
from tests.support.operators import BACKWARD, FORWARD, operators_run_by
from tests.support.tiers import each
from tests.support.torch_releases import needs_varlen, not_in_2_11
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


def leaves() -> Qkv:
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    return q, k, v


def call_torchs() -> Tensor:
    return functional.scaled_dot_product_attention(Q, K, V)


def test_enable_and_disable_are_idempotent() -> None:
    assert FORWARD not in operators_run_by(call_torchs)
    tk.enable()
    try:
        tk.enable()
        assert operators_run_by(call_torchs)[FORWARD] == 1
    finally:
        tk.disable()
    assert FORWARD not in operators_run_by(call_torchs)
    tk.disable()
    assert FORWARD not in operators_run_by(call_torchs)


def test_enabled_restores_the_previous_state() -> None:
    with pytest.raises(KeyError), tk.enabled():
        raise KeyError
    assert FORWARD not in operators_run_by(call_torchs)
    tk.enable()
    try:
        with tk.enabled():
            pass
        assert FORWARD in operators_run_by(call_torchs)
    finally:
        tk.disable()


def test_blocks_and_enable_are_independent() -> None:
    with tk.enabled():
        tk.disable()
        assert FORWARD in operators_run_by(call_torchs)
        tk.enable()
    try:
        assert FORWARD in operators_run_by(call_torchs)
    finally:
        tk.disable()
    assert FORWARD not in operators_run_by(call_torchs)


@pytest.mark.usefixtures("switched")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_sdpa_kernel_is_honoured(mode: Callable[[], Any]) -> None:
    with mode():
        with sdpa_kernel(SDPBackend.MATH):
            ran = operators_run_by(call_torchs)
            assert FORWARD not in ran
            assert "aten::_scaled_dot_product_attention_math" in ran
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert FORWARD in operators_run_by(call_torchs)
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            assert FORWARD in operators_run_by(call_torchs)
        with (
            sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
            pytest.raises(RuntimeError, match="No viable backend"),
        ):
            call_torchs()
    assert FORWARD in operators_run_by(call_torchs)


@pytest.mark.usefixtures("switched")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_runs_the_operator(mode: Callable[[], Any]) -> None:
    with mode():
        assert operators_run_by(call_torchs)[FORWARD] == 1


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
    assert FORWARD not in operators_run_by(call_torchs)


def forget_registration() -> None:
    """Removes what `enable` keeps registered for other threads; here they call nothing."""
    if (library := torch_switch._SWITCH.library) is not None:
        torch_private.remove_library(library)
        torch_switch._SWITCH.library = None


def test_devices_whose_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu/test_switch.py runs the replacement on a CUDA device."""
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
            assert operators_run_by(lambda: functional.scaled_dot_product_attention(x, x, x))[
                FORWARD
            ]
            parameter = nn.Parameter(Q)
            assert operators_run_by(
                lambda: functional.scaled_dot_product_attention(parameter, K, V)
            )[FORWARD]
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


def run_module(module: nn.Module, *inputs: Tensor, **options: Any) -> Tensor:
    o = module(*inputs, **options)
    first: Tensor = o[0] if isinstance(o, tuple) else o
    return first


MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(16, 4, batch_first=True),
    "encoder-layer": lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "full"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_inside_torchs_modules(make: Callable[[], nn.Module], masked: bool, training: bool) -> None:
    module = make().train(training)
    x = torch.randn(2, 9, 16)
    attention = isinstance(module, nn.MultiheadAttention)
    inputs = (x, x, x) if attention else (x,)
    options: dict[str, Any] = {"need_weights": False} if attention else {}
    if masked:
        name = "key_padding_mask" if attention else "src_key_padding_mask"
        options[name] = torch.arange(9) >= torch.tensor([[9], [6]])

    with torch.set_grad_enabled(training):
        expected = run_module(module, *inputs, **options)
        with tk.enabled():
            ran = operators_run_by(lambda: run_module(module, *inputs, **options))
            got = run_module(module, *inputs, **options)
    assert ran[FORWARD] == 1
    visible = ~options.get("src_key_padding_mask", torch.zeros(2, 9, dtype=torch.bool))
    assert_same_function(got[visible], expected[visible])


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_compiled_functions_follow_the_switch(compiler: str) -> None:
    """Inductor also caches compiled graphs on disk, keyed by the same operator name."""

    @torch.compile(backend=compiler, fullgraph=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_calls() -> int:
        return operators_run_by(lambda: compiled(Q, K, V))[FORWARD]

    expected = compiled(Q, K, V)
    assert forward_calls() == 0
    with tk.enabled():
        assert_same_function(compiled(Q, K, V), expected)
        assert forward_calls() == 1
    assert forward_calls() == 0


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
