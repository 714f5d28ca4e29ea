"""Cases of the suite `gpu`, most informative first, since a run may end early.

They are created on the CPU, so that they can be listed without a GPU; `Case.to` moves them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner.record import case_id
from transformer_kernels.bench import Case, Direction
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.operations import (
    linear_backward_operations,
    linear_forward_operations,
)

TOKENS = 16384
"""B * S of every case but those of `training_cases` and `packed_case`."""
WIDTH = 2048
"""H * D_v of the same cases."""

LENGTHS = (4096, 16384, 1024, 8192, 2048, 512)
MASKED_LENGTH = 8192
GPT2, GPT2_DROPOUT = "GPT-2", "GPT-2, dropout 0.1"
PACKED, DETERMINISTIC = "packed documents", "deterministic"
LINEAR = "linear"
"""Linear attention with phi = elu + 1, normalized."""
LINEAR_SUMS = "linear: sums"
"""Linear attention with phi(x) = x and no denominator: flash-linear-attention's kernel alone."""
BLOCK = 128


def gpu_case(
    name: str,
    S: int,
    D: int,
    *,
    D_v: int | None = None,
    mask: Mask | None = None,
    mask_name: str = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Returns a case with B = TOKENS / S and H = WIDTH / D_v; D_v defaults to D."""
    columns = D if D_v is None else D_v
    H = WIDTH // columns
    return Case(
        name=name, B=TOKENS // S, H_q=H, H_kv=H, M=S, N=S, D=D, D_v=columns,
        dtype=dtype, mask=mask, mask_name=mask_name,
    )  # fmt: skip


def name_of(case: Case) -> str:
    """Returns a name that is unique among the cases of the suite."""
    return f"{case_id(case)}-D{case.D}-B{case.B}"


def causal(S: int, D: int, D_v: int | None = None, *, dtype: torch.dtype = torch.bfloat16) -> Case:
    mask = Mask.causal()
    return gpu_case("causal", S, D, D_v=D_v, mask=mask, mask_name="causal", dtype=dtype)


def grid_cases() -> list[Case]:
    """Cases of the goals, then wide heads, the head sizes of latent attention, other dtypes, and
    small batches."""
    grid = [case(S, D) for S in LENGTHS for D in (128, 64) for case in (causal, _full)]
    wide = [case(S, 256) for S in (4096, 16384) for case in (causal, _full)]
    latent = [case(S, 192, 128) for S in (4096, 16384) for case in (causal, _full)]
    others = [causal(4096, 128, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    return [*grid, *wide, *latent, *others, *training_cases()]


def training_cases() -> list[Case]:
    """A layer of Llama 8B in small batches: 64 to 512 key blocks of 128, where the other cases have
    2048. A layer of GPT-2, with dropout (ours alone) and without."""
    causal: dict[str, Any] = {"mask": Mask.causal(), "mask_name": "causal", "dtype": torch.bfloat16}
    llama = [
        Case(name="Llama 8B", B=B, H_q=32, H_kv=8, M=S, N=S, D=128, D_v=128, **causal)
        for B, S in ((1, 2048), (2, 4096), (1, 4096), (2, 2048), (1, 1024))
    ]
    gpt2 = [
        Case(name=name, B=TOKENS // S, H_q=12, H_kv=12, M=S, N=S, dropout_p=p, **causal)
        for S in (4096, 1024)
        for name, p in ((GPT2, 0.0), (GPT2_DROPOUT, 0.1))
    ]
    return [*llama, *gpt2]


def _full(S: int, D: int, D_v: int | None = None) -> Case:
    return gpu_case("full", S, D, D_v=D_v)


def cost_masks(B: int, S: int, block: int) -> list[tuple[str, str, Mask | None]]:
    """Returns no mask, and masks whose cost should be proportional to the visible fraction: names
    of their cases, kinds and masks."""
    blocks = torch.arange(S // block)
    quarter = (blocks[:, None] - blocks) % 4 == 0
    ids = torch.arange(S).expand(B, -1) // (S // 2)
    return [
        ("masks: none", "none", None),
        ("masks: half padding", "padding", Mask.padding(torch.full((B,), S // 2))),
        ("masks: window of S/8", "window", Mask.window(S // 8 - 1, 0)),
        ("masks: 25% of blocks", "block_sparse", Mask.block_sparse(quarter, block)),
        ("masks: two documents", "segments", Mask.segments(ids)),
    ]


def masked_cases(S: int = MASKED_LENGTH, tokens: int = TOKENS) -> list[Case]:
    B = tokens // S
    return [
        replace(gpu_case(name, S, 128, mask=mask, mask_name=kind), B=B)
        for name, kind, mask in cost_masks(B, S, BLOCK)
    ]


def decode_cases() -> list[Case]:
    """Decoding: one query per head, for many sequences or one."""
    return [
        Case(
            name="decode", B=B, H_q=32, H_kv=8, M=1, N=N, D=128, D_v=128, dtype=torch.bfloat16,
        )
        for B, N in ((8, 32768), (1, 32768), (64, 2048))
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PackedCase(Case):
    """Causal attention of documents in one packed row of M = N tokens."""

    lengths: tuple[int, ...]

    @cached_property
    def visible(self) -> float:
        return sum(n * (n + 1) / 2 for n in self.lengths) / self.N**2

    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    def first(self, count: int) -> PackedCase:
        """Returns the case of the first documents alone."""
        lengths = self.lengths[:count]
        return replace(self, lengths=lengths, M=sum(lengths), N=sum(lengths))


def packed_case(tokens: int = 65536) -> PackedCase:
    """Documents whose lengths are lognormal, with a median of 300 tokens; the last is cut."""
    generator = torch.Generator().manual_seed(1)
    drawn = (300 * (0.8 * torch.randn(tokens, generator=generator)).exp()).int() + 1
    ends = [end for end in accumulate(drawn.tolist()) if end < tokens]
    lengths = [end - start for start, end in zip([0, *ends], [*ends, tokens], strict=True)]
    return PackedCase(
        name=PACKED, H_q=16, H_kv=16, M=tokens, N=tokens, D=128, D_v=128,
        dtype=torch.bfloat16, mask_name="causal", lengths=tuple(lengths),
    )  # fmt: skip


def deterministic_cases() -> list[Case]:
    return [replace(causal(S, D), name=DETERMINISTIC) for S, D in ((4096, 128), (16384, 64))]


@dataclass(frozen=True, kw_only=True)
class LinearCase(Case):
    """A case whose operations are those of the recurrence."""

    def operations(self, direction: Direction) -> float:
        sizes = self.B * self.H_q * self.M, self.B * self.H_kv * self.N, self.D, self.D_v
        forward, backward = linear_forward_operations(*sizes), linear_backward_operations(*sizes)
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[direction]


def linear_cases() -> list[Case]:
    """Causal linear attention, both kinds at each size."""
    sizes = [(4096, 128), (16384, 64), (1024, 64)]
    names = (LINEAR, LINEAR_SUMS)
    return [LinearCase(**vars(gpu_case(name, S, D))) for S, D in sizes for name in names]


def ceiling_cases() -> list[Case]:
    """Hardware ceilings, described as single-head attention with the same operations or bytes.

    "ceiling: matmul" has the operations of one product of 8192 x 8192 matrices. "ceiling: copy" has
    only a meaningful byte count: half are read and half are written.
    """
    side, length = 8192, 2**29
    return [
        Case(
            name=name, H_q=1, H_kv=1, M=M, N=M, D=width, D_v=width, dtype=torch.bfloat16,
        )
        for name, M, width in (("ceiling: matmul", side, side // 2), ("ceiling: copy", 1, length))
    ]  # fmt: skip
