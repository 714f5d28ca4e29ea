"""Cases whose mask hides keys from every query, with NaN in those keys."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.support.cases import Case, Relative, inputs, plant
from tests.support.evaluate import by_backend
from tests.support.mask_makers import (
    MaskMaker,
    blocks,
    both,
    causal,
    causal_bottom_right,
    dense,
    key_range,
    mixed_segments,
    padding,
    segments,
    window,
)

_EMPTY = window(-2, 1)
_KEYS = Relative(30, -9, "bottom_right", kind="keys")
_KINDS: dict[str, tuple[MaskMaker, ...]] = {
    "window": (causal, causal_bottom_right, window(9, 3), window(-40, None), _EMPTY),
    "keys": (padding, key_range),
    "segments": (segments, mixed_segments),
    "dense": (dense("mn"), dense("b1mn"), dense("bhmn")),
    "blocks": (blocks(16), blocks(7, heads=4), blocks(64)),
}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"softcap": 1.5, "dlse": True},
    {"bias": "bhmn", "dropout_p": 0.3},
    {"alibi": "top_left"},
    {"relative": Relative(9, -4), "dlse": True},
    {"relative": Relative(30, -9, kind="keys"), "softcap": 1.5},
    {"bias": "1h1n"},
)


def _conjunction(seed: int) -> Case:
    """Two to four kinds of constraint at random, with keys that are dead in one key head only."""
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    order = torch.randperm(len(_KINDS), generator=generator).tolist()
    names = [list(_KINDS)[n] for n in order[: 2 + pick(3)]]
    makers = [_KINDS[name][pick(len(_KINDS[name]))] for name in names]
    return Case(
        name=f"{seed}-{'-'.join(names)}",
        H_q=4,
        M=(1, 5, 33, 70)[pick(4)],
        N=(37, 64, 131)[pick(3)],
        D=8,
        D_v=8,
        mask=both(*makers),
        hidden=math.nan,
        **_OPTIONS[pick(len(_OPTIONS))],
    )


HIDDEN_CASES = (
    Case(name="crossed-window", M=70, N=131, mask=_EMPTY, hidden=math.nan),
    Case(name="crossed-windows", M=131, N=70, mask=both(window(-3, None), causal), hidden=math.nan),
    Case(name="crossed-window-bias", M=70, mask=_EMPTY, bias="bhmn", hidden=math.nan),
    Case(name="crossed-window-bias-keys", M=70, mask=_EMPTY, bias="1h1n", hidden=math.nan),
    Case(name="crossed-window-keys", M=70, mask=_EMPTY, relative=_KEYS, hidden=math.nan),
    Case(name="keys-heads-gqa", H_q=4, N=96, mask=dense("bhmn"), relative=_KEYS, hidden=math.nan),
    Case(
        name="keys-padding",
        M=70,
        mask=both(padding, causal_bottom_right),
        relative=_KEYS,
        hidden=math.nan,
    ),
    Case(name="one-query-crossed-window", M=1, mask=_EMPTY, hidden=math.nan),
    Case(name="dense-heads-gqa", B=1, H_q=4, mask=dense("bhmn"), softcap=1.5, hidden=math.nan),
    Case(name="few-queries-dense", M=5, H_q=4, mask=dense("bhmn"), hidden=math.nan),
    Case(name="blocks-heads-gqa", H_q=4, N=96, mask=blocks(7, heads=4), hidden=math.nan),
    *map(_conjunction, range(12)),
)


def assert_hidden_nan_changes_nothing(
    case: Case, dtype: torch.dtype, backend: str, device: torch.device | str = "cpu"
) -> None:
    """Asserts that NaN in dead keys and in fully masked queries changes no bit of any result."""
    clean = inputs(case, dtype, device)
    x = plant(case, clean)
    visible = case.visible(device)
    assert visible is not None
    seen = visible.any(dim=2).unflatten(1, (case.H_kv, -1)).any(dim=2)
    assert torch.equal(x.k.isnan().any(dim=3), ~seen)
    expected, got = by_backend(case, clean, backend), by_backend(case, x, backend)
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name
    for name in ("dk", "dv"):
        assert not got[name].masked_fill(seen[..., None], 0.0).any(), name
    assert not got["o"].masked_fill(visible.any(dim=3)[..., None], 0.0).any()
