"""Performance goals of the CPU kernels.

Where torch is near the limit of the machine, a goal is a share of that limit: the rate of a matrix
product (`gemm`), or the bandwidth of a sum (benchmarks/runner/ceilings.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from benchmarks.goals.goal import Columns, Goal
from benchmarks.runner.ceilings import GEMM, SUM
from benchmarks.runner.without_amx import SUFFIX
from transformer_kernels.bench import Direction

_GRID = ("full", "causal")
_GRID_WITHOUT_AMX = tuple(name + SUFFIX for name in _GRID)


def _over_sdpa(
    name: str, where: Columns, *, least: float, by: Literal["mean", "worst"] = "worst"
) -> Goal:
    over, under = {"variant": "sdpa"}, {"variant": "cpu"}
    return Goal(
        name=f"{name}: SDPA / ours, {by}", over=over, under=under, where=where, least=least, by=by
    )


def _cost(name: str, case: str, *, most: float) -> Goal:
    over, under = {"case": case}, {"case": case.split(":")[0] + ": none"}
    return Goal(name=name, over=over, under=under, where={"variant": "cpu"}, most=most)


def _mask(name: str) -> Goal:
    return _cost(f"{name}: relative time / visible fraction", f"masks: {name}", most=1.15)


def _means(
    name: str, dtype: str, cases: tuple[str, ...], *, fwd: float, both: float
) -> Iterator[Goal]:
    directions: tuple[tuple[str, Direction, float], ...] = (
        ("forward", "fwd", fwd),
        ("forward + backward", "fwd+bwd", both),
    )
    for title, direction, least in directions:
        where = {"dtype": dtype, "case": cases, "direction": direction}
        yield _over_sdpa(f"{dtype} {title}{name}", where, least=least, by="mean")


def _worst(dtype: str, *, least: float) -> Goal:
    return _over_sdpa(dtype, {"dtype": dtype, "case": _GRID}, least=least)


def _share(title: str, direction: Direction, *, least: float) -> Goal:
    return Goal(
        name=f"float32 {title}, S >= 2048: share of a matrix product's rate, worst",
        over={"variant": GEMM},
        under={"variant": "cpu"},
        where={"dtype": "float32", "case": _GRID, "N": (2048, 4096), "direction": direction},
        least=least,
    )


def _decode(name: str, N: int) -> Goal:
    over, under = {"variant": SUM}, {"variant": "cpu"}
    return Goal(
        name=f"decode, {name}: fraction of a sum's bandwidth",
        over=over, under=under, where={"case": "decode", "N": N}, least=0.85,
    )  # fmt: skip


def _scaling(name: str) -> Goal:
    over, under = {"threads": 1}, {"threads": 2}
    return Goal(
        name=f"{name}: speedup of 2 threads over 1",
        over=over, under=under, where={"case": f"scaling: {name}"}, least=1.8,
    )  # fmt: skip


_BESIDES_SDPA: tuple[Goal, ...] = (
    _share("forward", "fwd", least=0.9),
    _share("forward + backward", "fwd+bwd", least=0.85),
    _mask("half padding"),
    _mask("window of S/8"),
    _mask("25% of blocks"),
    _mask("two documents"),
    _cost("dropout 0.1: with / without", "options: dropout 0.1", most=1.35),
    _cost("bias: with / without", "options: bias", most=1.3),
    _cost("bias and its gradient: with / without", "options: bias and its gradient", most=1.6),
    _decode("(1, 32 / 8, 8192, 128)", N=8192),
    _decode("(8, 8, 4096, 64)", N=4096),
    _cost("decode, cache in order: over attention", "caches: in order", most=1.15),
    _cost("decode, pages of 64: over attention", "caches: pages of 64", most=1.15),
    _over_sdpa("short, (32, 8, 64, 32)", {"case": "short", "N": 64}, least=1.0),
    _over_sdpa("short, (1, 1, 16, 64)", {"case": "short", "N": 16}, least=1.0),
    _scaling("causal"),
    _scaling("one head"),
)

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
        goal
        for dtype, least in (("bfloat16", 1.0), ("float16", 1.0), ("float32", 1.1))
        for goal in (
            *_means("", dtype, _GRID, fwd=least, both=least),
            _worst(dtype, least=1.0),
        )
    ),
    *_BESIDES_SDPA,
)
"""Goals on a CPU without AMX."""

MODEL_GOALS: tuple[Goal, ...] = tuple(
    _over_sdpa(f"{dtype}, {title}", {"dtype": dtype, "direction": direction}, least=1.0)
    for dtype in ("float32", "bfloat16")
    for direction, title in (("fwd", "forward"), ("fwd+bwd", "forward + backward"))
)
"""No model is slower than with torch's SDPA."""
