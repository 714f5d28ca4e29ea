"""Performance goals of the GPU kernels on an H200."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases.gpu import LINEAR_SUMS
from benchmarks.goals.goal import Columns, Goal, SpeedGoal
from transformer_kernels.bench import Direction

OURS = {"triton": 1.15, "cuda_sm80": 1.15, "cuda_sm90": 1.10}
"""Our variants, with the largest allowed cost of a mask: relative time / visible fraction."""
_GRID: Columns = {"dtype": "bfloat16", "case": ("full", "causal"), "D": (64, 128)}
_TITLES: dict[Direction, str] = {"fwd": "forward", "bwd": "backward"}


def _against(ours: str, peer: str, direction: Direction, *, least: float) -> Goal:
    return Goal(
        name=f"{_TITLES[direction]}: {peer} / {ours}, mean",
        over={"variant": peer},
        under={"variant": ours},
        where={**_GRID, "direction": direction},
        least=least,
        by="mean",
    )


def _over_cudnn(direction: Direction, D: int, *, least: float) -> Goal:
    """Bound for every length from 1024 on, with and without a causal mask."""
    return Goal(
        name=f"{_TITLES[direction]}, D = {D}: sdpa_cudnn / cuda_sm90, worst",
        over={"variant": "sdpa_cudnn"},
        under={"variant": "cuda_sm90"},
        where={**_GRID, "direction": direction, "D": D, "N": (1024, 2048, 4096, 8192, 16384)},
        least=least,
    )


def _speeds(direction: Direction, D: int, *, full: float, causal: float) -> Iterator[Goal]:
    for case, least in (("full", full), ("causal", causal)):
        yield SpeedGoal(
            name=f"{_TITLES[direction]}, {case}, S = 16384, D = {D}: TFLOP/s of cuda_sm90",
            over={"variant": "cuda_sm90"},
            where={**_GRID, "case": case, "direction": direction, "N": 16384, "D": D},
            least=least,
        )


def _mask(ours: str, mask: str, *, most: float) -> Iterator[Goal]:
    for direction, title in _TITLES.items():
        yield Goal(
            name=f"{ours}, {mask}, {title}: relative time / visible fraction",
            over={"case": f"masks: {mask}"},
            under={"case": "masks: none"},
            where={"variant": ours, "direction": direction},
            most=most,
        )


def _linear(direction: Direction, *, least: float) -> Goal:
    return Goal(
        name=f"linear attention, {_TITLES[direction]}: fla / triton, mean",
        over={"variant": "fla"},
        under={"variant": "triton"},
        where={"case": LINEAR_SUMS, "direction": direction},
        least=least,
        by="mean",
    )


def _decode(cache: str, *, least: float) -> Goal:
    """Fraction of the bandwidth of a copy that moves as many bytes as decoding reads."""
    return Goal(
        name=f"decode, cache {cache}: fraction of a copy's bandwidth",
        over={"variant": "copy", "case": "caches: in order"},
        under={"variant": "cuda_sm80", "case": f"caches: {cache}"},
        where={"N": 32768, "B": 8},
        least=least,
    )


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
    _over_cudnn("fwd", 128, least=1.05),
    *_speeds("fwd", 128, full=720, causal=690),
    *_speeds("fwd", 64, full=520, causal=490),
    *_speeds("fwd", 256, full=760, causal=650),
    _over_cudnn("bwd", 128, least=1.05),
    *_speeds("bwd", 128, full=620, causal=590),
    *_speeds("bwd", 64, full=490, causal=450),
    *(
        goal
        for ours, most in OURS.items()
        for mask in ("half padding", "window of S/8", "25% of blocks")
        for goal in _mask(ours, mask, most=most)
    ),
    *(_linear(direction, least=1.0) for direction in _TITLES),
    *(_decode(cache, least=0.8) for cache in ("in order", "pages of 64", "pages of 16")),
)
"""Means are geometric, over shapes and masks."""
