"""What the Triton kernels are to reach on an H200, as data."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.goals import Columns, Goal
from transformer_kernels.bench import Direction

OURS = "triton"
_GRID: Columns = {"dtype": "bfloat16", "case": ("full", "causal"), "D": (64, 128)}
_TITLES: dict[Direction, str] = {"fwd": "forward", "bwd": "backward"}


def _against(peer: str, direction: Direction, *, least: float) -> Goal:
    return Goal(
        what=f"{_TITLES[direction]}: {peer} / ours, mean",
        over={"variant": peer},
        under={"variant": OURS},
        where={**_GRID, "direction": direction},
        least=least,
        by="mean",
    )


def _mask(name: str) -> Iterator[Goal]:
    for direction, title in _TITLES.items():
        yield Goal(
            what=f"{name}, {title}: share of time / share shown",
            over={"case": f"masks: {name}"},
            under={"case": "masks: none"},
            where={"variant": OURS, "direction": direction},
            most=1.15,
        )


GPU_GOALS: tuple[Goal, ...] = (
    _against("flex", "fwd", least=1.0),
    _against("sdpa_flash", "fwd", least=1.15),
    _against("sdpa_cudnn", "fwd", least=0.9),
    _against("flex", "bwd", least=1.0),
    _against("sdpa_flash", "bwd", least=1.0),
    *_mask("half padding"),
    *_mask("window of S/8"),
    *_mask("25% of blocks"),
)
"""Means are geometric, over shapes and masks."""
