"""Compiled code follows `enable` and `disable`: it is compiled once for each state."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from building.extension import ROOT
from tests.support.operators import FORWARD, operators_run_by
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.common import torch_private
from transformer_kernels.integrations import torch_switch

Attend = Callable[[Tensor], Tensor]
Q, X = torch.randn(2, 2, 7, 4), torch.randn(2, 7, 8)
LENGTHS = torch.nested.as_nested_tensor(
    [torch.randn(length, 2, 4) for length in (3, 5)], layout=torch.jagged
).transpose(1, 2)


def attend(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


def attend_by_operator(x: Tensor) -> Tensor:
    o: Tensor = torch.ops.aten.scaled_dot_product_attention.default(x, x, x)
    return o


def attend_again_in_backward(x: Tensor) -> Tensor:
    o: Tensor = checkpoint(attend, x, use_reentrant=False)
    return o


def multi_head() -> Attend:
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    return lambda x: module(x, x, x, need_weights=False)[0]


def encoder_layer() -> Attend:
    return nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()


def counted(function: Attend, fullgraph: bool = True) -> tuple[Attend, CompileCounterWithBackend]:
    """Compiles a function, without what was compiled before; also returns a count of graphs."""
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=backend, fullgraph=fullgraph), backend


def calls_of_our_kernels(compiled: Attend, x: Tensor, on: bool) -> int:
    with tk.enabled() if on else nullcontext():
        compiled(x)
        return operators_run_by(lambda: compiled(x))[FORWARD]


CASES: dict[str, tuple[Callable[[], Attend], Tensor, Any]] = {
    "function": (lambda: attend, Q, nullcontext),
    "training": (lambda: attend, Q.clone().requires_grad_(), nullcontext),
    "inference mode": (lambda: attend, Q, torch.inference_mode),
    "operator": (lambda: attend_by_operator, Q, torch.no_grad),
    "checkpoint": (lambda: attend_again_in_backward, Q.clone().requires_grad_(), nullcontext),
    "nested region": (lambda: torch.compiler.nested_compile_region(attend), Q, nullcontext),
    "MultiheadAttention": (multi_head, X, torch.no_grad),
    "TransformerEncoderLayer": (encoder_layer, X, torch.no_grad),
}


@each("case", CASES)
def test_each_state_is_compiled_once(case: str) -> None:
    make, x, context = CASES[case]
    compiled, backend = counted(make())
    with context():
        calls_of_our_kernels(compiled, x, on=True)
        backend.frame_count = 0
        states = [calls_of_our_kernels(compiled, x, on) for on in (True, False) * 2]
    assert states == [1, 0, 1, 0]
    assert backend.frame_count == 1


FIRST_COMPILATION = """
import torch
import transformer_kernels as tk

layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
attend = torch.nn.functional.scaled_dot_product_attention
x = torch.randn(2, 7, 8)
with tk.enabled():
    torch.compile(attend, backend="eager", fullgraph=True)(x, x, x)
with torch.no_grad():
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert (compiled(x) - layer(x)).abs().max() < 1e-5
"""


def test_the_first_compilation_of_a_process_may_be_that_of_the_replacement() -> None:
    """Afterwards torch's own operators are compiled as before."""
    subprocess.run([sys.executable, "-c", FIRST_COMPILATION], cwd=ROOT, check=True)


def test_a_lone_thread_keeps_what_compiled_code_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.get_ident(): None})
    monkeypatch.setattr(torch_switch._SWITCH, "guarded", False)
    with tk.enabled():
        pass
    assert torch_switch._SWITCH.library is None
    compiled, backend = counted(attend)
    states = [calls_of_our_kernels(compiled, Q, on) for on in (False, True) * 3]
    assert states == [0, 1] * 3
    assert backend.frame_count == 3  # the first has no guard, and is forgotten


def test_jagged_tensors_run_uncompiled_without_the_replacement() -> None:
    """torch cannot compile its own function for them on CPUs."""
    compiled, backend = counted(attend, fullgraph=False)
    states = [calls_of_our_kernels(compiled, LENGTHS, on) for on in (False, True) * 2]
    assert states == [0, 1, 0, 1]
    assert backend.frame_count == 1


def test_other_compiled_code_is_not_compiled_again() -> None:
    with tk.enabled():
        counted(attend)[0](Q)
        other, backend = counted(torch.sin)
        other(Q)
    for on in (True, False):
        assert calls_of_our_kernels(other, Q, on) == 0
    assert backend.frame_count == 1


def test_the_state_does_not_change_while_code_is_compiled() -> None:
    """The guards of compiled code are made at the end."""
    states: list[bool] = []
    thread = threading.Thread(target=tk.disable)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        thread.start()
        thread.join(timeout=0.1)
        states.append(torch_switch._SWITCH.on)
        return graph.forward

    torch.compiler.reset()
    tk.enable()
    try:
        torch.compile(attend, backend=backend, fullgraph=True)(Q)
        assert states == [True]
    finally:
        thread.join()
    assert not torch_switch._SWITCH.on


def test_a_torch_without_guards_compiles_again_at_each_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_private, "guard_compiled_code", lambda path: False)
    compiled, backend = counted(attend)
    states = [calls_of_our_kernels(compiled, Q, on) for on in (True, False) * 2]
    assert states == [1, 0, 1, 0]
    assert backend.frame_count == 4


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_graphs_of_the_replacement_are_not_cached_in_any_thread() -> None:
    """Settings of torch.compile belong to a thread."""
    before, after = functorch_config.enable_autograd_cache, []

    def compile_once() -> None:
        counted(attend)[0](Q)
        after.append(functorch_config.enable_autograd_cache)

    with tk.enabled():
        in_thread(compile_once)
        assert after == [False]
        assert not functorch_config.enable_autograd_cache
    assert functorch_config.enable_autograd_cache == before


@pytest.mark.exhaustive
def test_the_cache_on_disk_holds_torchs_graphs_only(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    states: list[int] = []

    def run() -> None:
        torch.compiler.reset()
        compiled = torch.compile(attend, fullgraph=True)
        states.append(calls_of_our_kernels(compiled, Q, on=torch_switch._SWITCH.on))

    for on in (True, False) * 2:
        with tk.enabled() if on else nullcontext():
            in_thread(run)
            run()
    assert states == [1, 1, 0, 0] * 2


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_results_of_both_states(compiler: str) -> None:
    """Inductor also caches compiled graphs on disk, keyed by the same operator name."""

    def causal(x: Tensor) -> Tensor:
        k = x[:, :, :5]
        return functional.scaled_dot_product_attention(x, k, k, is_causal=True)

    torch.compiler.reset()
    compiled = torch.compile(causal, backend=compiler, fullgraph=True)
    expected = compiled(Q)
    for on in (False, True, False):
        assert calls_of_our_kernels(compiled, Q, on) == on
        with tk.enabled() if on else nullcontext():
            assert_same_function(compiled(Q), expected)
    assert torch.equal(compiled(Q), expected)
