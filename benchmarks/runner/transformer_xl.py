"""Training steps of Transformer-XL over the length of its memory.

    python -m benchmarks.runner.transformer_xl
    python -m benchmarks.runner.transformer_xl --memories 0 512 --batch 4 --threads 1

A step is the forward and the backward pass of one segment with memories of the full length. The
variants are naive attention, torch's, and ours with the scores by distance as a dense bias or as
relative keys. All have the same weights, and their gradients of the position bias are compared
before they are timed, interleaved.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.runner.dense_skew import causal_bias
from transformer_kernels import RelativeKeys
from transformer_kernels.bench import Budget, Interleaver, peak_extra_bytes
from transformer_kernels.models import TransformerXL, TransformerXLConfig
from transformer_kernels.nn import AttnImplementation, attend, relative_attention

VARIANTS: dict[str, AttnImplementation] = {
    "naive": "eager",
    "torch": "sdpa",
    "dense bias": "fused",
    "relative keys": "fused",
}
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Row:
    """Median times, and peaks of memory in use beyond that before the step."""

    memory: int
    variant: str
    ms: float
    mib: float | None


def with_dense_bias(
    q: Tensor, k: Tensor, v: Tensor, *, relative: RelativeKeys, scale: float, **options: Any
) -> Tensor:
    """`attend` with the scores by distance stored as a bias (B, H, M, N)."""
    return attend(q, k, v, bias=causal_bias(q, relative, scale), scale=scale, **options)


def steps(config: TransformerXLConfig, batch: int) -> dict[str, Step]:
    """Returns functions that compute all gradients, and return that of the position bias."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (batch, config.context + 1), generator=generator)
    memories = tuple(
        torch.randn(batch, config.memory, config.width, generator=generator)
        for _ in range(config.layers)
    )
    models = {
        name: TransformerXL(config, attn_implementation=path) for name, path in VARIANTS.items()
    }
    for model in models.values():
        model.load_state_dict(models["naive"].state_dict())
    return {
        name: _step(model, tokens, memories, with_dense_bias if name == "dense bias" else attend)
        for name, model in models.items()
    }


def _step(
    model: TransformerXL,
    tokens: Tensor,
    memories: tuple[Tensor, ...],
    attention: Callable[..., Tensor],
) -> Step:
    def step() -> Tensor:
        with mock.patch.object(relative_attention, "attend", attention):
            logits, _ = model(tokens[:, :-1], memories)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            gradients = torch.autograd.grad(loss, [model.position_bias, *model.parameters()])
        return gradients[0]

    return step


def measure(config: TransformerXLConfig, batch: int, seconds: float) -> list[Row]:
    """Measures all variants.

    Raises:
        AssertionError: a gradient differs from that of naive attention.
    """
    every = steps(config, batch)
    expected = every["naive"]()
    for step in every.values():
        largest = float(expected.abs().max())
        torch.testing.assert_close(step(), expected, rtol=0.0, atol=1e-3 * largest)
    work = {name: lambda one=step: one for name, step in every.items()}
    timings = Interleaver(work).run(Budget(seconds))
    rows = []
    for name, timing in timings.items():
        peak = peak_extra_bytes(work[name])
        mib = None if peak is None else peak / 2**20
        rows.append(Row(config.memory, name, timing.median_ms, mib))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.transformer_xl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--memories", type=int, nargs="+", default=[0, 512, 1024])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--segment", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each memory")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| memory | attention | ms | naive over it | peak MiB |")
    print("|---:|---|---:|---:|---:|")
    for memory in args.memories:
        config = TransformerXLConfig(
            layers=args.layers, heads=args.heads, width=args.width,
            context=args.segment, memory=memory, dropout=0.0,
        )  # fmt: skip
        rows = measure(config, args.batch, args.seconds)
        for row in rows:
            mib = "-" if row.mib is None else f"{row.mib:.0f}"
            ratio = rows[0].ms / row.ms
            print(f"| {memory} | {row.variant} | {row.ms:.0f} | {ratio:.2f} | {mib} |", flush=True)


if __name__ == "__main__":
    main()
