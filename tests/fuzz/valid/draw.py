"""Strategies for cases. Simple alternatives come first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests.fuzz.valid.call import SdpaCase, Valid
from tests.support.attention import Hidden, Index, Kind, Relative
from tests.support.backends import ISAS
from tests.support.case import AnyCase, Layout
from tests.support.cases import Case
from tests.support.decode_cases import DecodeCase
from tests.support.delta import DeltaCase
from tests.support.linear import LinearCase
from tests.support.masks import (
    CAUSAL,
    CAUSAL_END,
    Blocks,
    Constraint,
    Dense,
    Intervals,
    KeyRange,
    Order,
    Positions,
    Segments,
    Selected,
    Window,
)
from tests.support.varlen_cases import VarlenCase
from transformer_kernels.masks.constraints import Align

Draw = st.DrawFn
T = TypeVar("T")

_NEAR_TILES = (
    *(0, 1, 2, 3, 5, 24, 25, 100, 193),
    *(tile + d for tile in (16, 32, 64, 128, 256) for d in (-1, 0, 1)),
)
_WIDTHS = (1, 2, 7, 8, 16, 17, 32, 33, 40, 64, 65, 80, 96, 128, 129, 192, 256)
_LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "strided", "unaligned", "expanded")
_SCALES = (0.3, -0.2, 0.0, 1e-40)
_DEVIATIONS = {
    "float64": (10.0, 1e3, 1e6),
    "float32": (10.0, 1e2, 1e3),
    "bfloat16": (10.0, 1e2, 1e3),
    "float16": (10.0, 1e2),
}


@dataclass(frozen=True)
class Limits:
    """Sizes that a backend runs in a few milliseconds, or tenths of a second in an interpreter."""

    length: int
    width: int
    heads: int
    dtypes: tuple[str, ...]

    def lengths(self, smallest: int = 0) -> st.SearchStrategy[int]:
        near = [n for n in _NEAR_TILES if smallest <= n <= self.length]
        return st.one_of(st.integers(smallest, self.length), st.sampled_from(near))

    def widths(self) -> st.SearchStrategy[int]:
        return st.sampled_from([n for n in _WIDTHS if n <= self.width])


_HALF_AND_FLOAT32 = ("float32", "bfloat16", "float16")
LIMITS = {
    "cpu": Limits(260, 256, 3, (*_HALF_AND_FLOAT32, "float64")),
    "reference": Limits(130, 128, 3, (*_HALF_AND_FLOAT32, "float64")),
    "cuda": Limits(200, 256, 2, _HALF_AND_FLOAT32),
    "triton": Limits(70, 80, 2, _HALF_AND_FLOAT32),
}

DrawCase = Callable[[Draw, str, str], AnyCase]
"""Draws a case for a backend and a dtype."""


@st.composite
def valid_calls(draw: Draw, backend: str, *kinds: DrawCase) -> Valid:
    """Calls of some kinds of cases: `dense`, `varlen`, `decode`, `sdpa`, `linear`, `delta`."""
    dtype = pick(draw, *LIMITS[backend].dtypes)
    state: dict[str, Any] = {"poisoned": draw(st.booleans()), "threads": pick(draw, 1, 2, 3)}
    if backend == "cpu":
        state["isa"] = draw(st.sampled_from(ISAS[::-1]))
    if backend == "cuda":
        state["chip"] = pick(draw, 80, 90)
        state["schedule"] = draw(st.integers(0, 99))
    case = pick(draw, *kinds)(draw, backend, dtype)
    return Valid(case=case, dtype=dtype, backend=backend, **state)


def pick(draw: Draw, *values: T) -> T:
    return draw(st.sampled_from(values))


def rarely(draw: Draw, one_in: int = 8) -> bool:
    return draw(st.integers(0, one_in - 1)) == one_in - 1


def sizes(draw: Draw, backend: str) -> dict[str, Any]:
    limits = LIMITS[backend]
    D, H_kv = draw(limits.widths()), draw(st.integers(1, limits.heads))
    return {
        "seed": draw(st.integers(0, 999)),
        "H_kv": H_kv,
        "H_q": H_kv * pick(draw, 1, 1, 2, 3),
        "D": D,
        "D_v": D if draw(st.booleans()) else draw(limits.widths()),
        "layout": pick(draw, *_LAYOUTS),
    }


def _scores(draw: Draw, dtype: str) -> dict[str, Any]:
    return {
        "scale": pick(draw, *_SCALES) if rarely(draw) else None,
        "softcap": pick(draw, 5.0, 0.5, 1e35) if rarely(draw) else None,
        "sinks": rarely(draw),
        "deviation": pick(draw, *_DEVIATIONS[dtype]) if rarely(draw) else 1.0,
        "bias_is_float32": dtype != "float64" and draw(st.booleans()),
    }


def _differentiable(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    relative = fields.get("relative")
    names = ["q", "k", "v"]
    names += ["bias"] * bool(fields.get("bias")) + ["sinks"] * fields["sinks"]
    if relative is not None:
        names += [name for name in ("table", "keys") if relative.kind in (name, "both")]
    names += ["slopes"] * fields.get("alibi_learns", False)
    return_lse = draw(st.booleans())
    return {
        "requires_grad": pick(draw, (), tuple(names), ("q",), ("k", "v")),
        "return_lse": return_lse,
        "dlse": return_lse,
    }


def _alibi(draw: Draw, aligns: tuple[Align, ...]) -> dict[str, Any]:
    slopes = pick(draw, "", "alibi_by_entry", "alibi_learns")
    return {"alibi": pick(draw, *aligns)} | ({slopes: True} if slopes else {})


def _dropout(draw: Draw) -> float:
    return pick(draw, 0.3, 0.9, 1.0) if rarely(draw, 4) else 0.0


def dense(draw: Draw, backend: str, dtype: str) -> Case:
    limits, fields = LIMITS[backend], sizes(draw, backend) | _scores(draw, dtype)
    M, N = draw(limits.lengths()), draw(limits.lengths())
    fields["mask"] = _constraints(draw, max(M, N), has_lists=backend != "cuda")
    fields["hidden"] = pick(draw, *_HIDDEN)
    bias = pick(draw, None, None, "tensor", "alibi")
    if bias == "tensor":
        fields["bias"] = pick(draw, *_BIASES)
        fields["bias_hides"] = rarely(draw)
    if bias == "alibi":
        fields |= _alibi(draw, _ALIGNS)
    if rarely(draw, 4):
        fields["relative"] = _relative(draw, max(M, N), _ALIGNS)
    fields["dropout_p"] = _dropout(draw)
    fields |= _differentiable(draw, fields)
    return Case(B=draw(st.integers(1, 3)), M=M, N=N, **fields)


_HIDDEN: tuple[Hidden, ...] = (None, "nan", "inf")
_BIASES = ("mn", "bhmn", "111n", "1h1n", "b1m1", "hmn", "1111")
_INDICES: tuple[Index, ...] = ("int32", "int64")
_ALIGNS: tuple[Align, ...] = ("top_left", "bottom_right")


def varlen(draw: Draw, backend: str, dtype: str) -> VarlenCase:
    limits, fields = LIMITS[backend], sizes(draw, backend) | _scores(draw, dtype)
    M = draw(st.lists(limits.lengths(), min_size=1, max_size=4).map(tuple))
    fields["one_cu_seqlens"] = draw(st.booleans())
    N = M if fields["one_cu_seqlens"] else tuple(draw(limits.lengths()) for _ in M)
    align: Align = "top_left"
    if draw(st.booleans()):
        fields["mask"] = _window(draw, limits.length)
        align = fields["mask"].align
    if rarely(draw, 4):
        fields |= _alibi(draw, (align,))
    if rarely(draw, 4):
        fields["relative"] = _relative(draw, max(M), (align,))
    fields["dropout_p"] = _dropout(draw)
    fields |= _differentiable(draw, fields)
    padding = pick(draw, 0, 3)
    return VarlenCase(
        lengths=tuple(zip(M, N, strict=True)),
        trailing=(padding, padding),
        index=pick(draw, *_INDICES),
        max_seqlens=(max(M), max(N)) if draw(st.booleans()) else None,
        **fields,
    )


def decode(draw: Draw, backend: str, dtype: str) -> DecodeCase:
    limits, fields = LIMITS[backend], sizes(draw, backend) | _scores(draw, dtype)
    if fields["layout"] == "expanded":
        del fields["layout"]
    longer = st.integers(0, 1500) if backend == "cpu" else limits.lengths()
    length = st.one_of(limits.lengths(), longer)
    if draw(st.booleans()):
        fields["page_size"] = pick(draw, 16, 1, 20, 64)
    window = replace(_window(draw, limits.length), align="bottom_right")
    fields["mask"] = pick(draw, None, window, window, ())
    if rarely(draw):
        kinds: tuple[Kind, ...] = ("table",) if backend == "cuda" else ("table", "keys", "both")
        fields["relative"] = _relative(draw, 40, ("bottom_right",), kinds)
    if backend != "cuda" and "relative" not in fields:
        fields["int8"] = draw(st.booleans())
    cache_seqlens = draw(st.lists(length, min_size=1, max_size=4).map(tuple))
    index = pick(draw, *_INDICES)
    if rarely(draw):
        bound, B = st.integers(-3, max(cache_seqlens) + 3), len(cache_seqlens)
        bounds = st.lists(bound, min_size=B, max_size=B).map(tuple)
        keys = KeyRange(start=draw(bounds), end=draw(bounds), dtype=index)
        others = {None: (CAUSAL_END,), (): ()}.get(fields["mask"], (fields["mask"],))
        fields["mask"] = (*others, keys)
    if rarely(draw):
        fields["alibi"] = "bottom_right"
        fields["alibi_by_entry"] = draw(st.booleans())
    return DecodeCase(
        cache_seqlens=cache_seqlens,
        N=max(cache_seqlens) + pick(draw, 0, 1, 40),
        M=pick(draw, 1, 2, 5, 25),
        index=index,
        return_lse=draw(st.booleans()),
        **fields,
    )


def sdpa(draw: Draw, backend: str, dtype: str) -> SdpaCase:
    limits, fields = LIMITS[backend], sizes(draw, backend) | _scores(draw, dtype)
    fields |= {"softcap": None, "sinks": False, "bias_is_float32": False}
    mask: tuple[Constraint, ...] = (CAUSAL,) if draw(st.booleans()) else ()
    kind = pick(draw, None, "mask", "bias")
    if kind == "mask":
        mask = (_dense_mask(draw), *mask)
    if kind == "bias":
        fields["bias"] = pick(draw, *_BIASES)
        fields["bias_hides"] = rarely(draw)
    fields["requires_grad"] = _differentiable(draw, fields)["requires_grad"]
    return SdpaCase(
        B=draw(st.integers(1, 3)),
        M=draw(limits.lengths(1)),
        N=draw(limits.lengths(1)),
        mask=mask,
        hidden=pick(draw, *_HIDDEN),
        replaced=draw(st.booleans()),
        **fields,
    )


def linear(draw: Draw, backend: str, dtype: str) -> LinearCase:
    limits, fields = LIMITS[backend], sizes(draw, backend)
    layout = pick(draw, "dense", "packed", "steps")
    several = st.lists(limits.lengths(), min_size=1, max_size=4).map(tuple)
    N = draw(limits.lengths())
    if layout == "packed":
        fields |= {"packed": draw(several), "trailing": pick(draw, 0, 3)}
    if layout == "steps":
        steps = st.sampled_from([1, 1, 2, 7, 33])
        fields["steps"] = draw(st.lists(steps, min_size=1, max_size=6).map(tuple))
    if layout == "dense" and rarely(draw, 4):
        fields["mask"] = _key_range(draw, N)
    if layout != "steps" and rarely(draw, 4):
        fields["causal"] = False
        fields["M"] = draw(limits.lengths(1)) if layout == "dense" else 0
    else:
        fields["decay"] = pick(draw, "", "head", "token", "reset")
    fields["feature_map"] = pick(draw, "elu", "relu", "identity")
    return LinearCase(
        B=draw(st.integers(1, 3)),
        N=N,
        normalize=fields["feature_map"] != "identity" and draw(st.booleans()),
        eps=pick(draw, 1e-6, 0.5),
        state=draw(st.booleans()),
        **fields,
    )


def delta(draw: Draw, backend: str, dtype: str) -> DeltaCase:
    limits, fields = LIMITS[backend], sizes(draw, backend)
    H_k, heads = fields.pop("H_kv"), fields.pop("H_q")
    layout = pick(draw, "dense", "packed", "steps")
    several = st.lists(limits.lengths(), min_size=1, max_size=4).map(tuple)
    if layout == "packed":
        fields |= {"packed": draw(several), "trailing": pick(draw, 0, 3)}
    if layout == "steps":
        steps = st.sampled_from([1, 1, 2, 7, 33])
        fields["steps"] = draw(st.lists(steps, min_size=1, max_size=6).map(tuple))
    return DeltaCase(
        B=draw(st.integers(1, 3)),
        H_k=H_k,
        H_v=heads,
        T=draw(limits.lengths()),
        gate=pick(draw, "none", "scalar", "channel", "reset"),
        l2norm=draw(st.booleans()),
        scale=pick(draw, *_SCALES) if rarely(draw) else None,
        state=draw(st.booleans()),
        **fields,
    )


def _relative(
    draw: Draw,
    longest: int,
    aligns: tuple[Align, ...],
    kinds: tuple[Kind, ...] = ("table", "keys", "both"),
) -> Relative:
    """A relative bias or keys of up to `longest` positions."""
    return Relative(
        entries=pick(draw, 1, 2, 9, max(longest, 1), 2 * longest + 1),
        lowest=pick(draw, 0, -1, 3, -longest, longest + 5, -2 * longest - 9),
        align=pick(draw, *aligns),
        shared=draw(st.booleans()),
        kind=pick(draw, *kinds),
    )


def _constraints(draw: Draw, length: int, has_lists: bool) -> tuple[Constraint, ...]:
    """Up to three constraints of any kind."""
    by_token = _key_range, _segments, _positions, _intervals
    lists = (_selected,) if has_lists else ()
    kinds = st.sampled_from((_window, *by_token, _dense_mask, _blocks, *lists))
    return tuple(draw(kinds)(draw, length) for _ in range(draw(st.integers(0, 3))))


def _window(draw: Draw, length: int) -> Window:
    side = _side(length)
    return Window(draw(side), draw(side), pick(draw, *_ALIGNS))


def _side(length: int) -> st.SearchStrategy[int | None]:
    near = (st.integers(0, 20), st.integers(-20, -1))
    return st.one_of(st.just(0), st.none(), *near, st.integers(-length, length))


def _key_range(draw: Draw, length: int) -> KeyRange:
    start = st.lists(st.integers(-3, length), min_size=1, max_size=3).map(tuple)
    end = st.lists(st.integers(0, length + 9), min_size=1, max_size=3).map(tuple)
    return KeyRange(start=draw(st.one_of(st.none(), start)), end=draw(end))


def _segments(draw: Draw, length: int) -> Segments:
    return Segments(
        length=pick(draw, None, None, 31, 2),
        count=draw(st.integers(1, 4)),
        ordered=draw(st.booleans()),
        equal=draw(st.booleans()),
        without=pick(draw, (0, 0), (5, 7)),
        seed=_seed(draw),
    )


def _positions(draw: Draw, length: int) -> Positions:
    side, dims = _side(length), st.sampled_from(["", "b", "h", "bh"])
    orders: tuple[Order, ...] = ("sorted", "reversed", "shuffled")
    order = st.sampled_from(orders)
    return Positions(
        draw(side), draw(side), draw(dims), draw(dims), draw(order), draw(order), _seed(draw)
    )


def _intervals(draw: Draw, length: int) -> Intervals:
    dims = st.sampled_from(["", "b", "h", "bh"])
    sides = pick(draw, "both", "low", "high")
    return Intervals(sides, draw(st.booleans()), draw(dims), draw(dims), _seed(draw))


def _dense_mask(draw: Draw, length: int = 0) -> Dense:
    return Dense(
        dims=pick(draw, "mn", "bhmn", "b1mn", "hmn", "111n", "b11n", "11m1"),
        share=pick(draw, 50, 90, 10),
        byte=pick(draw, 1, 2, 255),
        transposed=draw(st.booleans()),
        seed=_seed(draw),
    )


def _blocks(draw: Draw, length: int) -> Blocks:
    return Blocks(
        size=pick(draw, 16, 3, 64, 200),
        by_head=draw(st.booleans()),
        share=pick(draw, 50, 90, 10),
        seed=_seed(draw),
    )


def _selected(draw: Draw, length: int) -> Selected:
    count, size = draw(st.integers(0, 60)), pick(draw, 1, 1, 3, 64)
    return Selected(count, size, pick(draw, "", "b", "h", "bh"), _seed(draw))


def _seed(draw: Draw) -> int:
    return draw(st.integers(0, 99))
