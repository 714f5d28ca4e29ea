"""Performance goals of the CPU kernels.

Where torch is near the limit of the machine, a goal is a share of that limit: the rate of a matrix
product (`gemm`), or the bandwidth of a sum (benchmarks/runner/ceilings.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from benchmarks.goals.goal import Goal, goal
from benchmarks.runner.ceilings import GEMM, SUM
from benchmarks.runner.without_amx import SUFFIX
from transformer_kernels.bench import Direction

_GRID = ("full", "causal")
_GRID_WITHOUT_AMX = tuple(name + SUFFIX for name in _GRID)
_TITLES: dict[Direction, str] = {"fwd": "forward", "fwd+bwd": "forward + backward"}


def _over_sdpa(name: str, *, by: Literal["mean", "worst"] = "worst", **columns: Any) -> Goal:
    return goal(f"{name}: SDPA / ours, {by}", "sdpa", by=by, **columns)


def _cost(name: str, case: str, *, most: float) -> Goal:
    plain = {"case": case.split(":")[0] + ": none"}
    return goal(name, {"case": case}, plain, most=most, variant="cpu")


def _means(
    name: str, dtype: str, cases: tuple[str, ...], *, fwd: float, both: float
) -> Iterator[Goal]:
    for (direction, title), least in zip(_TITLES.items(), (fwd, both), strict=True):
        title = f"{dtype} {title}{name}"
        yield _over_sdpa(
            title, by="mean", least=least, dtype=dtype, case=cases, direction=direction
        )


def _worst(dtype: str, *, least: float) -> Goal:
    return _over_sdpa(dtype, least=least, dtype=dtype, case=_GRID)


_BESIDES_SDPA: tuple[Goal, ...] = (
    *(
        goal(
            f"float32 {_TITLES[direction]}, S >= 2048: share of a matrix product's rate, worst",
            GEMM, least=least, dtype="float32", case=_GRID, N=(2048, 4096), direction=direction,
        )
        for direction, least in zip(_TITLES, (0.9, 0.85), strict=True)
    ),
    *(
        _cost(f"{mask}: relative time / visible fraction", f"masks: {mask}", most=1.15)
        for mask in ("half padding", "window of S/8", "25% of blocks", "two documents")
    ),
    _cost("dropout 0.1: with / without", "options: dropout 0.1", most=1.35),
    _cost("bias: with / without", "options: bias", most=1.3),
    _cost("bias and its gradient: with / without", "options: bias and its gradient", most=1.6),
    *(
        goal(
            f"decode, {name}: fraction of a sum's bandwidth", SUM, least=0.85, case="decode", N=N
        )
        for name, N in (("(1, 32 / 8, 8192, 128)", 8192), ("(8, 8, 4096, 64)", 4096))
    ),
    _cost("decode, cache in order: over attention", "caches: in order", most=1.15),
    _cost("decode, pages of 64: over attention", "caches: pages of 64", most=1.15),
    _over_sdpa("short, (32, 8, 64, 32)", least=1.0, case="short", N=64),
    _over_sdpa("short, (1, 1, 16, 64)", least=1.0, case="short", N=16),
    *(
        goal(
            f"{name}: speedup of 2 threads over 1", {"threads": 1}, {"threads": 2},
            least=1.8, case=f"scaling: {name}",
        )
        for name in ("causal", "one head")
    ),
)  # fmt: skip

GOALS: tuple[Goal, ...] = (
    *_means("", "bfloat16", _GRID, fwd=2.4, both=4.0),
    *_means(", AMX off", "bfloat16", _GRID_WITHOUT_AMX, fwd=1.0, both=1.0),
    _worst("bfloat16", least=1.8),
    *_means("", "float16", _GRID, fwd=3.2, both=3.0),
    *_means(", AMX off", "float16", _GRID_WITHOUT_AMX, fwd=1.0, both=1.0),
    _worst("float16", least=2.0),
    *_means("", "float32", _GRID, fwd=1.4, both=1.5),
    *_means(", AMX off", "float32", _GRID_WITHOUT_AMX, fwd=1.1, both=1.1),
    _worst("float32", least=1.0),
    *_BESIDES_SDPA,
)
"""Goals on a CPU with AMX, with which torch's SDPA is fast in half precision too. Means are
geometric, over shapes and masks."""

GOALS_WITHOUT_AMX: tuple[Goal, ...] = (
    *(
        one
        for dtype, least in (("bfloat16", 1.0), ("float16", 1.0), ("float32", 1.1))
        for one in (
            *_means("", dtype, _GRID, fwd=least, both=least),
            _worst(dtype, least=1.0),
        )
    ),
    *_BESIDES_SDPA,
)
"""Goals on a CPU without AMX."""

MODEL_GOALS: tuple[Goal, ...] = tuple(
    _over_sdpa(f"{dtype}, {title}", least=1.0, dtype=dtype, direction=direction)
    for dtype in ("float32", "bfloat16")
    for direction, title in _TITLES.items()
)
"""No model is slower than with torch's SDPA."""
