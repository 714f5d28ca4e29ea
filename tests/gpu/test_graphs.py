"""CUDA graphs: forward and backward captured once and replayed with other inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.gpu.on_device import Step, assert_same_bits, step, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

S = 193


def capture(call: Step) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """Returns the captured graph and its output tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


def masks() -> dict[str, tk.Mask]:
    ids = torch.arange(S).expand(2, -1) // 70
    visible = torch.rand(2, 1, S, S) < 0.6
    visible[..., 0] = True
    return {
        "full": tk.Mask(),
        "causal": tk.Mask.causal(),
        "padding": tk.Mask.padding(torch.tensor([S, 60])),
        "segments": tk.Mask.segments(ids),
        "two segments": tk.Mask.segments(ids) & tk.Mask.segments(ids % 2),
        "dense": tk.Mask.dense(visible),
        "block_sparse": tk.Mask.block_sparse(torch.rand(7, 7) < 0.7, 32),
    }


@pytest.mark.parametrize("name", masks())
def test_a_replay_uses_the_current_inputs(name: str, backend: str) -> None:
    x, mask = tensors(), masks()[name].to("cuda")
    graph, outputs = capture(lambda: step(x, backend, mask=mask))
    for _ in range(2):
        with torch.no_grad():
            for tensor in x:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        assert_same_bits(outputs, step(x, backend, mask=mask))


def test_a_replay_uses_the_current_mask_tensors(backend: str) -> None:
    x, lengths = tensors(), torch.tensor([S, 60], device="cuda")
    options: dict[str, Any] = {"mask": tk.Mask.padding(lengths) & tk.Mask.causal()}
    graph, outputs = capture(lambda: step(x, backend, **options))
    lengths.copy_(torch.tensor([17, S]))
    graph.replay()
    assert_same_bits(outputs, step(x, backend, **options))


def test_a_replay_uses_the_current_seed(backend: str) -> None:
    x, seed = tensors(), torch.tensor(3, device="cuda")
    options: dict[str, Any] = {"dropout_p": 0.3, "seed": seed}
    graph, outputs = capture(lambda: step(x, backend, **options))
    graph.replay()
    before = [output.clone() for output in outputs]
    seed.fill_(4)
    graph.replay()
    assert not torch.equal(outputs[0], before[0])
    assert_same_bits(outputs, step(x, backend, **options))


def test_each_replay_draws_new_dropout_bits(backend: str) -> None:
    x = tensors()
    graph, outputs = capture(lambda: step(x, backend, dropout_p=0.3))
    graph.replay()
    before = outputs[0].clone()
    graph.replay()
    assert not torch.equal(outputs[0], before)
