"""Cases whose mask hides keys from every query, with NaN in those keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.attention import Relative
from tests.support.case import Device
from tests.support.cases import Case
from tests.support.masks import (
    CAUSAL,
    CAUSAL_END,
    DOCUMENTS,
    MIXED,
    Blocks,
    Constraint,
    Dense,
    Window,
    key_range,
    padding,
)

_EMPTY = Window(-2, 1)
_KEYS = Relative(30, -9, "bottom_right", kind="keys")
_KINDS: dict[str, tuple[Constraint, ...]] = {
    "window": (CAUSAL, CAUSAL_END, Window(9, 3), Window(-40, None), _EMPTY),
    "keys": (padding(64), key_range(64)),
    "segments": (DOCUMENTS, MIXED),
    "dense": (Dense("mn"), Dense("b1mn"), Dense("bhmn")),
    "blocks": (Blocks(16), Blocks(7, by_head=True), Blocks(64)),
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
    constraints = tuple(_KINDS[name][pick(len(_KINDS[name]))] for name in names)
    return Case(
        name=f"{seed}-{'-'.join(names)}",
        H_q=4,
        M=(1, 5, 33, 70)[pick(4)],
        N=(37, 64, 131)[pick(3)],
        D=8,
        D_v=8,
        mask=constraints,
        hidden="nan",
        **_OPTIONS[pick(len(_OPTIONS))],
    )


HIDDEN_CASES = (
    Case(name="crossed-window", M=70, N=131, mask=_EMPTY, hidden="nan"),
    Case(name="crossed-windows", M=131, N=70, mask=(Window(-3, None), CAUSAL), hidden="nan"),
    Case(name="crossed-window-bias", M=70, mask=_EMPTY, bias="bhmn", hidden="nan"),
    Case(name="crossed-window-bias-keys", M=70, mask=_EMPTY, bias="1h1n", hidden="nan"),
    Case(name="crossed-window-keys", M=70, mask=_EMPTY, relative=_KEYS, hidden="nan"),
    Case(name="keys-heads-gqa", H_q=4, N=96, mask=Dense("bhmn"), relative=_KEYS, hidden="nan"),
    Case(
        name="keys-padding",
        M=70,
        mask=(padding(), CAUSAL_END),
        relative=_KEYS,
        hidden="nan",
    ),
    Case(name="one-query-crossed-window", M=1, mask=_EMPTY, hidden="nan"),
    Case(name="dense-heads-gqa", B=1, H_q=4, mask=Dense("bhmn"), softcap=1.5, hidden="nan"),
    Case(name="few-queries-dense", M=5, H_q=4, mask=Dense("bhmn"), hidden="nan"),
    Case(name="blocks-heads-gqa", H_q=4, N=96, mask=Blocks(7, by_head=True), hidden="nan"),
    *map(_conjunction, range(12)),
)


def assert_hidden_nan_changes_nothing(
    case: Case, dtype: torch.dtype, backend: str, device: Device = "cpu"
) -> None:
    """Asserts that NaN in dead keys and in fully masked queries changes no bit of any result."""
    clean, x = (one.inputs(dtype, device) for one in (replace(case, hidden=None), case))
    queries, keys = (dead.to(device) for dead in case.dead())
    assert torch.equal(x.k.isnan().any(dim=3, keepdim=True), keys)
    expected, got = case.run(clean, backend), case.run(x, backend)
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name
    for name in ("dk", "dv"):
        assert not got[name].masked_fill(~keys, 0.0).any(), name
    assert not got["o"].masked_fill(~queries, 0.0).any()
