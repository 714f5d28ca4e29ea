"""Time over the visible fraction, with every kind of mask. Every query sees at least one key.

`selected` compares lists of 2,048 of 32,768 keys with the same pairs as a dense mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.runner.checks import BOUND, Sizes, attention_contenders, compared, relative_error
from benchmarks.runner.record import case_id
from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels import attention
from transformer_kernels.bench import Attend, Case, Direction
from transformer_kernels.masks.block_patterns import fixed, local, strided
from transformer_kernels.masks.mask import Mask

LENGTH = 2048
BLOCK = 64
KEYS, SELECTED = 32_768, 2048
BOTH: tuple[Direction, ...] = ("fwd", "fwd+bwd")


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
        ("images of 256 in text", "blocks", Mask.blocks(images(length, 256))),
        ("8 answers to a prompt", "shared_prefix", Mask.shared_prefix(answers)),
        ("global and window 64", "global_window", Mask.global_window(length, 16, 64)),
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


def zigzag(length: int) -> torch.Tensor:
    """Positions of 8 chunks in the order 0, 7, 1, 6, ...: two to a device, with equal work."""
    chunks = torch.arange(length).chunk(8)
    return torch.cat([chunk for n in range(4) for chunk in (chunks[n], chunks[7 - n])])


def causal_by(positions: torch.Tensor) -> Mask:
    """Causal mask by the position of each token."""
    return Mask.positions(positions[None], positions[None])


def comparisons() -> Iterator[Comparison]:
    for case in cases():
        yield compared(case, BOTH)
    for dtype in (torch.float32, torch.bfloat16):
        for H_q, H_kv, M, size, alike in (
            (32, 8, 1, 1, 1),
            (32, 8, 16, 1, 1),
            (16, 1, 256, 1, 1),
            (8, 2, 256, 1, 1),
            (8, 2, 256, 128, 1),
            (8, 2, 256, 128, 64),
        ):
            case = Sizes(
                name=f"selected by {size}, {alike} alike", H_q=H_q, H_kv=H_kv, M=M, N=KEYS, D=128,
                D_v=128, dtype=dtype, mask_name="selected", share=SELECTED / KEYS,
            )  # fmt: skip
            measurements = partial(selected, case, size, alike)
            yield Comparison(name=case_id(case), measurements=measurements)


def selected(case: Sizes, size: int, alike: int, run: Run) -> Iterator[Measurement]:
    """Lists of random blocks of `size` keys, which `alike` queries in a row share."""
    inputs = case.inputs()
    lists = [torch.randperm(KEYS // size)[: SELECTED // size].sort().values
             for _ in range(0, case.M, alike)]  # fmt: skip
    mask = Mask.selected(torch.stack(lists).repeat_interleave(alike, dim=0)[None], size)
    dense = Mask.dense(mask.materialize(1, 1, case.M, KEYS))
    attends: dict[str, Attend] = {
        "lists": partial(attention, mask=mask),
        "dense": partial(attention, mask=dense),
    }
    with torch.no_grad():
        got, expected = (attend(*inputs[:3]) for attend in attends.values())
    error = relative_error(case.name, got, expected, BOUND[case.dtype])
    for direction in BOTH[: 1 if case.M == 1 else 2]:
        yield run.timed(attention_contenders(case, direction, attends, inputs, {"lists": error}))
