"""Context parallel: one sequence on two processes.

Each process holds half of the tokens of a sequence, and of every activation. Within
`context_parallel` the layers of a model run as they are; attention passes keys and values around
the ring of processes. The layout is a zigzag: each process has an early and a late piece, and so
the same work under a causal mask. Loss and gradients are those of the undivided sequence.

This program starts two processes on this machine. With torchrun, each process runs `train` alone.

    $ python examples/context_parallel.py
    256 of 512 tokens in each process, loss 4.6348
    undivided, loss 4.6348; 36 gradients agree
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy

from transformer_kernels.distributed import context_parallel
from transformer_kernels.models import GPT2, GPT2Config

LENGTH, VOCABULARY, PROCESSES = 512, 100, 2


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / LENGTH


def train(rank: int, file: str) -> None:
    """Compares a divided step with an undivided one, in process `rank`."""
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)  # the same weights and tokens in each process
    config = GPT2Config(
        layers=2, heads=4, width=128, vocabulary=VOCABULARY, context=LENGTH, dropout=0.0
    )
    model = GPT2(config)
    text = torch.randint(VOCABULARY, (1, LENGTH + 1))
    tokens, targets = text[:, :-1], text[:, 1:]

    with context_parallel() as context:
        logits = model(context.shard(tokens, dim=1))
        loss = summed_loss(logits, context.shard(targets, dim=1))
    loss.backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    for total in (loss.detach(), *gradients):  # each process has its tokens' share
        dist.all_reduce(total)

    whole = summed_loss(model(tokens), targets)
    torch.testing.assert_close(loss.detach(), whole.detach())
    expected = torch.autograd.grad(whole, [*model.parameters()])
    torch.testing.assert_close(gradients, list(expected), rtol=1e-3, atol=1e-5)
    if rank == 0:
        print(f"{logits.shape[1]} of {LENGTH} tokens in each process, loss {loss.item():.4f}")
        print(f"undivided, loss {whole.item():.4f}; {len(gradients)} gradients agree")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (str(Path(folder) / "store"),), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
