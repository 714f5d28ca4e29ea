"""Time over the visible fraction, with every kind of mask. Every query sees at least one key."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.runner.checks import compared
from benchmarks.runner.run import Comparison
from transformer_kernels.bench import Case
from transformer_kernels.masks.block_patterns import fixed, local, strided
from transformer_kernels.masks.mask import Mask

LENGTH = 2048
BLOCK = 64


def cases() -> list[Case]:
    length, blocks = LENGTH, LENGTH // BLOCK
    causal = Mask.causal()
    answers = torch.arange(length)[None] // (length // 9)
    masks = [
        ("full", "none", None),
        ("causal", "causal", causal),
        ("causal as a tensor", "dense", Mask.dense(causal.materialize(1, 1, length, length))),
        ("window 1024", "window", Mask.window(1023, 0)),
        ("window 256", "window", Mask.window(255, 0)),
        ("window 64", "window", Mask.window(63, 0)),
        ("half the keys", "key_range", key_range(length // 4, length * 3 // 4)),
        ("3/4 padding", "padding", Mask.padding(torch.tensor([length // 4]))),
        ("documents of 512", "segments", documents(length, 512)),
        ("all but itself", "segments", Mask.segments(torch.arange(length)[None], equal=False)),
        ("positions, zigzag", "positions", causal_by(zigzag(length))),
        ("positions, shuffled", "positions", causal_by(torch.randperm(length))),
        ("documents of 128, causal", "segments and causal", documents(length, 128) & causal),
        ("prefix of 512", "prefix_lm", Mask.prefix_lm(torch.tensor([512]), length)),
        ("images of 256 in text", "blocks", Mask.blocks(images(length, 256))),
        ("8 answers to a prompt", "shared_prefix", Mask.shared_prefix(answers)),
        ("global and window 64", "global_window", Mask.global_window(length, 16, 64)),
        ("block diffusion", "block_diffusion", Mask.block_diffusion(length // 2, block=16)),
        ("every 8th of 512", "dilated", dilated(torch.arange(length), 512)),
        ("the same, sorted", "dilated", dilated(torch.arange(length).view(-1, 8).T.flatten(), 512)),
        ("local blocks", "block_sparse", Mask.block_sparse(local(blocks, blocks, 4), BLOCK)),
        ("strided blocks", "block_sparse", Mask.block_sparse(strided(blocks, blocks, 4), BLOCK)),
        ("fixed blocks", "block_sparse", Mask.block_sparse(fixed(blocks, blocks, 4), BLOCK)),
    ]
    return [
        Case(name=name, M=length, N=length, mask=mask, mask_name=mask_name)
        for name, mask_name, mask in masks
    ]


def documents(length: int, size: int) -> Mask:
    """Segment mask of documents of `size` tokens in one row."""
    return Mask.segments(torch.arange(length)[None] // size)


def images(length: int, size: int) -> torch.Tensor:
    """Block ids: images of `size` tokens, and as many tokens of text after each."""
    number = torch.arange(length)[None] // size
    return torch.where(number % 2 == 0, number, -1)


def key_range(start: int, end: int) -> Mask:
    return Mask.key_range(torch.tensor([start]), torch.tensor([end]))


def dilated(positions: torch.Tensor, window: int) -> Mask:
    """Causal window in which a query sees every 8th key."""
    return Mask.segments(positions[None] % 8) & Mask.positions(
        positions[None], positions[None], left=window - 1
    )


def zigzag(length: int) -> torch.Tensor:
    """Positions of 8 chunks in the order 0, 7, 1, 6, ...: two to a device, with equal work."""
    chunks = torch.arange(length).chunk(8)
    return torch.cat([chunk for n in range(4) for chunk in (chunks[n], chunks[7 - n])])


def causal_by(positions: torch.Tensor) -> Mask:
    """Causal mask by the position of each token."""
    return Mask.positions(positions[None], positions[None])


def comparisons() -> Iterator[Comparison]:
    for case in cases():
        yield compared(case, ("fwd", "fwd+bwd"))
