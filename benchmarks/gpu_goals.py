"""What the kernels for GPUs are to reach on an H200, as data."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.goals import Columns, Goal
from transformer_kernels.bench import Direction

OURS = ("triton", "cuda_sm80")
_GRID: Columns = {"dtype": "bfloat16", "case": ("full", "causal"), "D": (64, 128)}
_TITLES: dict[Direction, str] = {"fwd": "forward", "bwd": "backward"}


def _against(ours: str, peer: str, direction: Direction, *, least: float) -> Goal:
    return Goal(
        what=f"{_TITLES[direction]}: {peer} / {ours}, mean",
        over={"variant": peer},
        under={"variant": ours},
        where={**_GRID, "direction": direction},
        least=least,
        by="mean",
    )


def _mask(ours: str, name: str) -> Iterator[Goal]:
    for direction, title in _TITLES.items():
        yield Goal(
            what=f"{ours}, {name}, {title}: share of time / share shown",
            over={"case": f"masks: {name}"},
            under={"case": "masks: none"},
            where={"variant": ours, "direction": direction},
            most=1.15,
        )


def _decode(cache: str, *, least: float) -> Goal:
    """Of a copy that reads and writes as many bytes as there are keys and values. Every B."""
    return Goal(
        what=f"decode, a cache {cache}: share of a copy's bandwidth",
        over={"variant": "copy", "case": "caches: in order"},
        under={"variant": "cuda_sm80", "case": f"caches: {cache}"},
        where={"N": 32768, "B": 8},
        least=least,
    )


# sdpa_flash has the instructions of cuda_sm80, and sdpa_cudnn those of sm_90: twice as fast.
GPU_GOALS: tuple[Goal, ...] = (
    _against("triton", "flex", "fwd", least=1.0),
    _against("triton", "sdpa_flash", "fwd", least=1.15),
    _against("triton", "sdpa_cudnn", "fwd", least=0.9),
    _against("triton", "flex", "bwd", least=1.0),
    _against("triton", "sdpa_flash", "bwd", least=1.0),
    _against("cuda_sm80", "sdpa_flash", "fwd", least=1.0),
    _against("cuda_sm80", "sdpa_flash", "bwd", least=1.0),
    *(
        goal
        for ours in OURS
        for mask in ("half padding", "window of S/8", "25% of blocks")
        for goal in _mask(ours, mask)
    ),
    *(_decode(cache, least=0.8) for cache in ("in order", "pages of 64", "pages of 16")),
)
"""Means are geometric, over shapes and masks."""
