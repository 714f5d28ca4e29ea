"""Reversible stacks: gradients equal those of plain autograd; what is saved, drawn and repeated."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_kernels.bench.memory import memory_can_be_measured
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import ReformerBlock, ReversibleBlock, ReversibleStack
from transformer_kernels.nn.reformer_blocks import Choices

WIDTH = 12


def options() -> dict[str, Any]:
    """Options of the blocks: the same hashes at every call."""
    return {"rounds": 2, "generator": torch.Generator().manual_seed(6)}


def reformer_blocks(layers: int = 3, dropout: float = 0.0) -> ReversibleStack:
    torch.manual_seed(0)
    stack = ReversibleStack(
        ReformerBlock(WIDTH, 2, chunk=4, dropout=dropout) for _ in range(layers)
    )
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stack


def streams(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x1, x2 = (
        torch.randn(2, 11, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(2)
    )
    return x1.requires_grad_(), x2.requires_grad_()


def loss_of(stack: ReversibleStack, *x: Tensor) -> Tensor:
    """A loss in which both streams count, with the same dropout at every call."""
    torch.manual_seed(5)
    y1, y2 = stack(*x, **options())
    loss: Tensor = (y1 * y1.detach().cos()).sum() + (y2 * y2.detach().sin()).sum()
    return loss


def gradients(stack: ReversibleStack, *x: Tensor) -> list[Tensor]:
    wanted = [each for each in (*x, *stack.parameters()) if each.requires_grad]
    return list(torch.autograd.grad(loss_of(stack, *x), wanted))


def plain(stack: ReversibleStack) -> ReversibleStack:
    """The same weights under plain autograd."""
    other = copy.deepcopy(stack)
    other.reversible = False
    return other


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_results_and_gradients_equal_those_of_plain_autograd(dropout: float) -> None:
    stack, x = reformer_blocks(dropout=dropout).double(), streams()
    torch.manual_seed(5)
    found = stack(*x, **options())
    torch.manual_seed(5)
    wanted = plain(stack)(*x, **options())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert_same_function(gradients(stack, *x), gradients(plain(stack), *x))


def test_backward_adds_to_grad_and_reaches_hooks() -> None:
    stack, x = reformer_blocks().double(), streams()
    expected = gradients(plain(stack), *x)
    seen: list[Tensor] = []
    first = next(stack.parameters())
    first.register_hook(seen.append)
    for _ in range(2):
        loss_of(stack, *x).backward()
    found = [each.grad for each in (*x, *stack.parameters())]
    assert_same_function(found, [2 * each for each in expected])
    assert len(seen) == 2
    assert_same_function(seen[0], expected[2])


def test_frozen_parameters_and_inputs_get_no_gradient() -> None:
    stack, (x1, x2) = reformer_blocks().double(), streams()
    for parameter in stack[1].parameters():
        parameter.requires_grad_(False)
    x2 = x2.detach()
    assert_same_function(gradients(stack, x1, x2), gradients(plain(stack), x1, x2))
    loss_of(stack, x1, x2).backward()
    assert all(p.grad is None for p in stack[1].parameters())
    assert all(p.grad is not None for p in stack[0].parameters())


def test_shared_weights_get_the_sum_of_their_gradients() -> None:
    block, x = reformer_blocks(1).double()[0], streams()
    shared = ReversibleStack([block, block, block])
    assert_same_function(gradients(shared, *x), gradients(plain(shared), *x))


def test_inside_activation_checkpointing() -> None:
    stack, x = reformer_blocks(dropout=0.4).double(), streams()
    torch.manual_seed(5)
    y1, y2 = checkpoint(lambda *x: stack(*x, **options()), *x, use_reentrant=False)
    loss = (y1 * y1.detach().cos()).sum() + (y2 * y2.detach().sin()).sum()
    found = torch.autograd.grad(loss, [*x, *stack.parameters()])
    assert_same_function(list(found), gradients(plain(stack), *x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_residuals_are_float32_and_gradients_those_of_plain_autograd(
    dtype: torch.dtype,
) -> None:
    """The backward pass runs outside the autocast context, as usual."""
    stack, x = reformer_blocks(dropout=0.4), streams(torch.float32)
    results = []
    for each in (stack, plain(stack)):
        wanted = [*x, *each.parameters()]
        with torch.autocast("cpu", dtype):
            loss = loss_of(each, *x)
        results.append((loss, *torch.autograd.grad(loss, wanted)))
    y1, y2 = stack(*x, **options())
    assert y1.dtype == y2.dtype == torch.float32
    assert torch.equal(results[0][0], results[1][0])
    for found, wanted in zip(*results, strict=True):
        error = (found - wanted).norm() / wanted.norm()
        assert error < 0.02, error


def test_weights_used_outside_the_stack_keep_their_gradient_under_autocast() -> None:
    stack, x = reformer_blocks(1), streams(torch.float32)
    shared = stack.get_parameter("0.feed_forward.up_proj.weight")
    with torch.autocast("cpu", torch.bfloat16):
        stack(*x, **options())
        outside = nn.functional.linear(x[0].detach(), shared)
    (gradient,) = torch.autograd.grad(outside.float().sum(), [shared])
    expected = x[0].detach().sum(dim=(0, 1)).expand_as(gradient)
    assert_same_function(gradient, expected, dtype=torch.bfloat16)


def test_backward_leaves_the_random_generator_as_it_was() -> None:
    stack, x = reformer_blocks(dropout=0.4).double(), streams()
    loss = loss_of(stack, *x)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


class Counting(ReversibleBlock):
    """f has a random choice: the sign of its results. Counts the choices it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.chosen = 0

    def f(
        self, x: Tensor, choices: Choices | None = None, **options: Any
    ) -> tuple[Tensor, Choices]:
        if choices is None:
            self.chosen += 1
            generator = torch.Generator().manual_seed(self.chosen)
            choices = (torch.randint(2, x.shape, generator=generator) * 2 - 1,)
        return x.tanh() * self.weight * choices[0], choices

    def g(self, x: Tensor) -> Tensor:
        return x.sin()


def test_choices_are_made_once_and_repeated() -> None:
    stack, x = ReversibleStack([Counting(), Counting()]).double(), streams()
    expected = gradients(plain(stack), *x)
    assert_same_function(gradients(stack, *x), expected)
    assert [block.chosen for block in stack] == [1, 1]


@pytest.mark.parametrize("layers", [1, 6])
def test_only_the_last_outputs_and_the_orders_are_saved(layers: int) -> None:
    stack, x = reformer_blocks(layers).double(), streams()
    saved: list[Tensor] = []

    def pack(each: Tensor) -> Tensor:
        saved.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        y = stack(*x, **options())
    assert [tuple(each.shape) for each in saved] == [(2, 11, WIDTH)] * 2
    node: Any = y[0].grad_fn
    assert len(node.records) == layers
    assert all(record.choices[0].dtype == torch.int32 for record in node.records)


PEAKS = """
import torch
from transformer_kernels.bench.memory import peak_extra_bytes
from transformer_kernels.nn import ReformerBlock, ReversibleStack

x = torch.randn(1, 4096, 64)
for reversible in (True, False):
    for layers in (2, 12):
        stack = ReversibleStack(ReformerBlock(64, 2, chunk=64) for _ in range(layers))
        stack.requires_grad_(False)
        stack.reversible = reversible
        inputs = x.requires_grad_()

        def work():
            y1, y2 = stack(inputs, inputs, rounds=1, generator=torch.Generator())
            (y1 + y2).sum().backward()

        print(peak_extra_bytes(lambda: work) / 2**20)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not memory_can_be_measured(), reason="needs Linux's peak resident set size")
def test_memory_does_not_grow_with_the_depth() -> None:
    """Peak memory in MiB, of 2 and of 12 layers. A layer's output has 1 MiB, its order 32 KiB.

    The fixed threshold keeps free memory from piling up in the heap of the C library.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAKS],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    two, twelve, plain_two, plain_twelve = map(float, done.stdout.split())
    assert twelve - two < 2
    assert plain_twelve - plain_two > 100


def test_second_derivatives_are_refused() -> None:
    stack, x = reformer_blocks().double(), streams()
    (first,) = torch.autograd.grad(loss_of(stack, *x).square(), x[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_without_gradients_nothing_is_saved_and_results_are_the_same() -> None:
    stack, x = reformer_blocks().double(), streams()
    with torch.no_grad():
        torch.manual_seed(5)
        y = stack(*x, **options())
    torch.manual_seed(5)
    torch.testing.assert_close(y, stack(*x, **options()), rtol=0, atol=0)
    assert y[0].grad_fn is None
