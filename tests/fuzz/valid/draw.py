"""Strategies for options of valid calls and for masks. Simple alternatives come first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.valid.masks import Blocks, Constraint, Dense, KeyRange, Positions, Segments, Window
from tests.support.isas import ISAS
from transformer_kernels.masks.constraints import Align

Draw = st.DrawFn

_NEAR_TILES = (
    *(0, 1, 2, 3, 5, 24, 25, 100, 193),
    *(tile + d for tile in (16, 32, 64, 128, 256) for d in (-1, 0, 1)),
)
_WIDTHS = (1, 2, 7, 8, 16, 17, 32, 33, 40, 64, 65, 80, 96, 128, 129, 192, 256)


@dataclass(frozen=True)
class Limits:
    """Sizes that a backend runs in a few milliseconds, or tenths of a second in an interpreter."""

    length: int
    width: int
    heads: int
    dtypes: tuple[str, ...]


_HALF_AND_FLOAT32 = ("float32", "bfloat16", "float16")
LIMITS = {
    "cpu": Limits(260, 256, 3, (*_HALF_AND_FLOAT32, "float64")),
    "reference": Limits(130, 128, 3, (*_HALF_AND_FLOAT32, "float64")),
    "cuda": Limits(200, 256, 2, _HALF_AND_FLOAT32),
    "triton": Limits(70, 80, 2, _HALF_AND_FLOAT32),
}


def lengths(limits: Limits, smallest: int = 1) -> st.SearchStrategy[int]:
    near = [n for n in _NEAR_TILES if smallest <= n <= limits.length]
    return st.one_of(st.integers(smallest, limits.length), st.sampled_from(near))


def widths(limits: Limits) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in _WIDTHS if n <= limits.width])


def rarely(draw: Draw) -> bool:
    """True in one of eight calls."""
    return draw(st.integers(0, 7)) == 7


def shared(draw: Draw, backend: str) -> dict[str, Any]:
    """Fields of `Valid`."""
    limits = LIMITS[backend]
    dtype = draw(st.sampled_from(limits.dtypes))
    D = draw(widths(limits))
    fields: dict[str, Any] = {
        "backend": backend,
        "seed": draw(st.integers(0, 999)),
        "dtype": dtype,
        "H_kv": draw(st.integers(1, limits.heads)),
        "group": draw(st.sampled_from([1, 1, 2, 3])),
        "D": D,
        "D_v": D if draw(st.booleans()) else draw(widths(limits)),
        "layout": draw(st.sampled_from(_LAYOUTS)),
        "scale": draw(st.sampled_from(_SCALES)) if rarely(draw) else None,
        "softcap": draw(st.sampled_from([5.0, 0.5, 1e35])) if rarely(draw) else None,
        "sinks": rarely(draw),
        "deviation": draw(st.sampled_from(_DEVIATIONS[dtype])) if rarely(draw) else 1.0,
        "poisoned": draw(st.booleans()),
        "threads": draw(st.sampled_from([1, 2, 3])),
    }
    if backend == "cpu":
        fields["isa"] = draw(st.sampled_from(ISAS[::-1]))
    if backend == "cuda":
        fields["chip"] = draw(st.sampled_from([80, 90]))
        fields["schedule"] = draw(st.integers(0, 99))
    return fields


_LAYOUTS = ("contiguous", "transposed", "strided", "unaligned", "expanded")
_SCALES = (0.3, -0.2, 0.0, 1e-40)
_DEVIATIONS = {
    "float64": (10.0, 1e3, 1e6),
    "float32": (10.0, 1e2, 1e3),
    "bfloat16": (10.0, 1e2, 1e3),
    "float16": (10.0, 1e2),
}


def constraints(draw: Draw, length: int) -> tuple[Constraint, ...]:
    """Up to three constraints of any kind."""
    kinds = st.sampled_from((window, _key_range, _segments, _positions, dense_mask, _blocks))
    return tuple(draw(kinds)(draw, length) for _ in range(draw(st.integers(0, 3))))


def window(draw: Draw, length: int) -> Window:
    side = _side(length)
    align: Align = draw(st.sampled_from(["top_left", "bottom_right"]))
    return Window(left=draw(side), right=draw(side), align=align)


def _side(length: int) -> st.SearchStrategy[int | None]:
    return st.one_of(
        st.just(0),
        st.none(),
        st.integers(0, 20),
        st.integers(-20, -1),
        st.integers(-length, length),
    )


def _key_range(draw: Draw, length: int) -> KeyRange:
    several = st.lists(st.integers(0, length), min_size=1, max_size=3).map(tuple)
    return KeyRange(start=draw(st.one_of(st.none(), several)), length=draw(several))


def _segments(draw: Draw, length: int) -> Segments:
    count, ordered, equal = st.integers(1, 4), st.booleans(), st.booleans()
    return Segments(count=draw(count), ordered=draw(ordered), equal=draw(equal), seed=_seed(draw))


def _positions(draw: Draw, length: int) -> Positions:
    side, dims = _side(length), st.sampled_from(["", "b", "h", "bh"])
    return Positions(
        left=draw(side),
        right=draw(side),
        dims=draw(dims),
        ordered=draw(st.booleans()),
        seed=_seed(draw),
    )


def dense_mask(draw: Draw, length: int = 0) -> Dense:
    return Dense(
        dims=draw(st.sampled_from(["mn", "bhmn", "b1mn", "hmn", "n", "bn", "m"])),
        share=draw(st.sampled_from([50, 90, 10])),
        byte=draw(st.sampled_from([1, 2, 255])),
        transposed=draw(st.booleans()),
        seed=_seed(draw),
    )


def _blocks(draw: Draw, length: int) -> Blocks:
    return Blocks(
        size=draw(st.sampled_from([16, 3, 64, 200])),
        by_head=draw(st.booleans()),
        share=draw(st.sampled_from([50, 90, 10])),
        seed=_seed(draw),
    )


def _seed(draw: Draw) -> int:
    return draw(st.integers(0, 99))
