"""Performance goals of the GPU kernels on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from benchmarks.goals.goal import Goal, goal
from benchmarks.gpu_cases import DETERMINISTIC, GPT2, GPT2_DROPOUT, LINEAR_SUMS, PACKED
from transformer_kernels.bench import Direction

OURS = {"triton": 1.15, "cuda_sm80": 1.15, "cuda_sm90": 1.10}
"""Our variants, with the largest allowed cost of a mask: relative time / visible fraction."""
_TITLES: dict[Direction, str] = {"fwd": "forward", "bwd": "backward"}


def _grid(
    name: str,
    over: str,
    under: str,
    direction: Direction,
    *,
    least: float,
    **columns: object,
) -> Goal:
    by: Literal["mean", "worst"] = "worst" if columns else "mean"
    where: dict[str, Any] = {
        "dtype": "bfloat16",
        "case": ("full", "causal"),
        "D": (64, 128),
        **columns,
    }
    name = f"{_TITLES[direction]}{name}"
    return goal(name, over, under, least=least, by=by, direction=direction, **where)


def _against(ours: str, peer: str, direction: Direction, *, least: float) -> Goal:
    return _grid(f": {peer} / {ours}, mean", peer, ours, direction, least=least)


def _over_cudnn() -> Iterator[Goal]:
    """Bound for every length from 1024 on, with and without a causal mask. A bound in TFLOP/s would
    measure the power limit of the day: cuDNN took up to 1.10 times as long as on another one."""
    lengths = (1024, 2048, 4096, 8192, 16384)
    for direction in _TITLES:
        for D in (64, 128, 192, 256):
            name = f", D = {D}: sdpa_cudnn / cuda_sm90, worst"
            yield _grid(name, "sdpa_cudnn", "cuda_sm90", direction, least=1.0, D=D, N=lengths)


def _masks(ours: str, *, most: float) -> Iterator[Goal]:
    """A window of S/8 takes 9 blocks of 128 keys where 8 would do: a bound of its own."""
    for mask, bound in (("half padding", most), ("window of S/8", 1.25), ("25% of blocks", most)):
        for direction, title in _TITLES.items():
            name = f"{ours}, {mask}, {title}: relative time / visible fraction"
            over, under = {"case": f"masks: {mask}"}, {"case": "masks: none"}
            yield goal(name, over, under, most=bound, variant=ours, direction=direction)


def _linear(direction: Direction) -> Goal:
    name = f"linear attention, {_TITLES[direction]}: fla / triton, mean"
    return goal(name, "fla", "triton", least=1.0, by="mean", case=LINEAR_SUMS, direction=direction)


def _packed(direction: Direction) -> Goal:
    name = f"packed documents, {_TITLES[direction]}: torch varlen / cuda"
    return goal(name, "torch varlen", "cuda", least=1.0, case=PACKED, direction=direction)


def _decode(cache: str, B: int = 8, N: int = 32768, *, least: float = 0.8) -> Goal:
    """Fraction of the bandwidth of a copy that moves as many bytes as decoding reads."""
    name = f"decode, {B} x {N}, cache {cache}: fraction of a copy's bandwidth"
    over = {"variant": "copy", "case": "caches: in order"}
    under = {"variant": "cuda_sm80", "case": f"caches: {cache}"}
    return goal(name, over, under, least=least, N=N, B=B)


# sdpa_flash uses the same instructions as cuda_sm80, sdpa_cudnn those of sm_90, which are twice as
# fast. On Hopper, TRANSFORMER_KERNELS_HOPPER=0 selects cuda_sm80.
GPU_GOALS: tuple[Goal, ...] = (
    _against("triton", "flex", "fwd", least=1.0),
    _against("triton", "sdpa_flash", "fwd", least=1.15),
    _against("triton", "sdpa_cudnn", "fwd", least=0.9),
    _against("triton", "flex", "bwd", least=1.0),
    _against("triton", "sdpa_flash", "bwd", least=1.0),
    _against("cuda_sm80", "sdpa_flash", "fwd", least=1.0),
    _against("cuda_sm80", "sdpa_flash", "bwd", least=1.0),
    *_over_cudnn(),
    *(one for ours, most in OURS.items() for one in _masks(ours, most=most)),
    goal(
        f"{GPT2_DROPOUT}, backward: with / without",
        {"case": GPT2_DROPOUT},
        {"case": GPT2},
        most=1.05,
        variant="cuda_sm90",
        direction="bwd",
    ),
    goal(
        "deterministic backward, speed relative to that without, worst",
        "cuda_sm90",
        "cuda_sm90, deterministic",
        least=0.9,
        case=DETERMINISTIC,
        direction="bwd",
    ),
    *(_packed(direction) for direction in _TITLES),
    *map(_linear, _TITLES),
    _decode("in order", least=0.9),
    *map(_decode, ("pages of 64", "pages of 16")),
    _decode("in order", 64, 2048),
    _decode("in order", 1, least=0.7),
)
"""Means are geometric, over shapes and masks."""
