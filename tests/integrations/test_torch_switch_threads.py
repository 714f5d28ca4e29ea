"""`enable` and `enabled` in several threads, while others attend."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

import transformer_kernels as tk
from building.extension import ROOT
from tests.support.operators import FORWARD, operators_run_by
from tests.support.torch_releases import needs_varlen
from transformer_kernels.integrations import torch_switch

Q, K, V = (torch.randn(2, 3, length, 4) for length in (3, 5, 5))


def attend() -> torch.Tensor:
    return functional.scaled_dot_product_attention(Q, K, V)


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
        assert FORWARD in operators_run_by(attend)
    finally:
        leave.set()
        thread.join()
    assert FORWARD not in operators_run_by(attend)


@needs_varlen
def test_a_registration_kept_for_other_threads_runs_torchs_attention() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    q, k, v = tensors = tuple(x.clone().requires_grad_() for x in (Q, K, V))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    cotangent = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, tensors, cotangent)
    try:
        with tk.enabled():
            pass
        assert torch_switch._SWITCH.library is not None
        ran = operators_run_by(lambda: functional.scaled_dot_product_attention(Q, K, K))
        assert FORWARD not in ran
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert torch.equal(o, expected)
        for got, want in zip(
            torch.autograd.grad(o, tensors, cotangent), expected_grads, strict=True
        ):
            assert torch.equal(got, want)
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
