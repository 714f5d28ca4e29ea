"""torch's flop counter and selective checkpointing know the operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import transformer_kernels as tk
from tests.support.backends import NAMES

OPERATORS = {"cpu": "attention", "triton": "triton"}


def flops(call: Callable[[], Tensor]) -> dict[str, int]:
    """Returns the FLOPs of the result and its backward pass, by operator."""
    with FlopCounterMode(display=False) as counter:
        o = call()
        if o.requires_grad:
            o.sum().backward()
    return {str(k).rpartition(".")[2]: n for k, n in counter.get_flop_counts()["Global"].items()}


def inputs(
    B: int, H_q: int, H_kv: int, M: int, N: int, D: int, D_v: int
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H_q, M, D), (B, H_kv, N, D), (B, H_kv, N, D_v)
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("backend", [name for name in NAMES if name in OPERATORS])
def test_flops_are_those_that_torch_counts(backend: str) -> None:
    q, k, v = inputs(2, 4, 2, 7, 13, 16, 8)
    o_shape = torch.Size((2, 4, 7, 8))
    assert flops(lambda: tk.attention(q, k, v, backend=backend)) == {
        f"{OPERATORS[backend]}_forward": sdpa_flop_count(q.shape, k.shape, v.shape),
        f"{OPERATORS[backend]}_backward": sdpa_backward_flop_count(
            o_shape, q.shape, k.shape, v.shape
        ),
    }


def test_flops_of_masks_are_those_of_visible_pairs() -> None:
    q, k, v = inputs(1, 2, 2, 7, 7, 16, 8)
    mask = tk.Mask.dense(torch.randn(1, 1, 7, 7) > 0) & tk.Mask.causal()
    pairs = 2 * int(mask.materialize(1, 1, 7, 7).sum())
    assert flops(lambda: tk.attention(q, k, v, mask=mask)) == {
        "attention_forward": 2 * pairs * 24,
        "attention_backward": 2 * pairs * 64,
    }


def test_flops_of_torchs_attention_are_counted_when_it_is_replaced() -> None:
    x = inputs(1, 2, 2, 7, 7, 8, 8)
    with tk.enabled():
        counted = flops(lambda: scaled_dot_product_attention(*x, is_causal=True))
    assert counted == {"attention_forward": 2 * 2 * 28 * 16, "attention_backward": 2 * 2 * 28 * 40}


def test_flops_of_sequences() -> None:
    q, k, v = (x[0].transpose(0, 1) for x in inputs(1, 2, 2, 9, 9, 8, 8))
    ends = torch.tensor([0, 2, 2, 9])
    pairs = 2 * sum((end - start) ** 2 for start, end in pairwise(ends.tolist()))
    counted = flops(lambda: tk.attention_varlen(q, k, v, ends))
    assert counted == {"attention_forward": 2 * pairs * 16, "attention_backward": 2 * pairs * 40}
    q, k, v = (x.detach() for x in inputs(3, 2, 2, 1, 9, 8, 8))
    counted = flops(lambda: tk.attention_decode(q, k, v, torch.tensor([5, 0, 9])))
    assert counted == {"attention_forward": 2 * 2 * (5 + 9) * 16}


def test_flops_of_linear_attention() -> None:
    q, k, v = inputs(1, 4, 2, 5, 5, 8, 16)
    products = {"forward": 4 + 2, "backward": 2 * 4 + 3 * 2}
    assert flops(lambda: tk.linear_attention(q, k, v)) == {
        f"linear_{direction}": 2 * heads * 5 * 8 * 16 for direction, heads in products.items()
    }
    state = tk.LinearState(torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8))
    q, k, v = (x[:, :, :1].detach() for x in (q, k, v))
    counted = flops(lambda: tk.linear_attention_decode(q, k, v, state))
    assert counted == {"linear_steps": 2 * 6 * 8 * 16}


def test_flops_of_the_delta_rule() -> None:
    v, k, _ = inputs(1, 4, 2, 5, 5, 16, 16)
    gate = torch.zeros(1, 4, 5)
    counted = flops(lambda: tk.gated_delta_rule(k, k, v, gate, gate))
    assert counted == {
        "delta_forward": 3 * 2 * 4 * 5 * 16 * 16, "delta_backward": 8 * 2 * 4 * 5 * 16 * 16
    }  # fmt: skip
    v, k = v[:, :, :1].detach(), k[:, :, :1].detach()
    counted = flops(
        lambda: tk.gated_delta_rule_step(k, k, v, None, gate[:, :, :1], torch.zeros(1, 4, 16, 16))
    )
    assert counted == {"delta_steps": 3 * 2 * 4 * 16 * 16}


def test_flops_without_values() -> None:
    with FakeTensorMode():
        q, k, v = inputs(1, 2, 2, 7, 7, 8, 8)
        mask = tk.Mask.padding(torch.tensor([3])) & tk.Mask.causal()
        counted = flops(lambda: tk.attention(q, k, v, mask=mask))
    assert counted["attention_forward"] == 2 * 2 * 28 * 16


@pytest.mark.parametrize("backend", [name for name in NAMES if name in OPERATORS])
def test_selective_checkpointing_runs_a_saved_kernel_once(backend: str) -> None:
    leaves = inputs(1, 2, 2, 7, 13, 8, 16)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tk.attention(q.sin(), k, v, dropout_p=0.25, backend=backend).cos()

    def step(run: Callable[..., Tensor]) -> tuple[int, tuple[Tensor, ...]]:
        """Returns the FLOPs of forward kernels, and the gradients."""
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            grads = torch.autograd.grad(run(*leaves).sum(), leaves)
        counts = counter.get_flop_counts()["Global"]
        forward = {operator.overloadpacket for operator in tk.forward_operators()}
        return sum(n for operator, n in counts.items() if operator in forward), grads

    saving = partial(create_selective_checkpoint_contexts, list(tk.forward_operators()))
    once, expected = step(layer)
    for context_fn, runs in ((saving, 1), (noop_context_fn, 2)):
        run = partial(checkpoint, layer, use_reentrant=False, context_fn=context_fn)
        flops, grads = step(run)
        assert flops == runs * once
        assert all(map(torch.equal, grads, expected))
