"""The CPU kernels for few queries and many keys, which read k and v in place, split over the keys.

Forward: the decoding kernel, for up to 24 queries. Backward: backward_rows.h, for up to 16 queries
of the heads that share a key head, without bias, relative bias and relative keys.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

import transformer_kernels as tk
from building.extension import ROOT
from tests.support.attention import Hidden
from tests.support.backends import DTYPES, ISAS
from tests.support.case import assert_case
from tests.support.cases import Case
from tests.support.masks import (
    CAUSAL,
    CAUSAL_END,
    MIXED,
    Blocks,
    Constraints,
    Dense,
    Window,
    key_range,
    padding,
)
from tests.support.tiers import crossed

HIDDEN: tuple[Hidden, ...] = (None, "nan", "inf")
SPLIT = 512
"""Keys per split; kSplitKeys in csrc/cpu/attention/decode_workspace.h."""


def _sizes() -> list[Case]:
    lengths = (1, 31, 63, 64, 65, 1000, SPLIT - 1, SPLIT, SPLIT + 1, 4099)
    lanes = (
        *((1, 1), (1, 2), (1, 3), (1, 4), (4, 1), (4, 2), (4, 3), (4, 4), (8, 1), (8, 2), (5, 1)),
        *((20, 1), (12, 2), (3, 7), (6, 4), (1, 17), (1, 20), (2, 24), (3, 17), (1, 25)),
    )
    widths = (
        *((1, 1), (2, 3), (7, 5), (16, 16), (17, 33), (24, 8), (48, 80), (64, 64), (100, 36)),
        *((128, 128), (256, 16), (511, 512)),
    )
    return [
        *(
            Case(name=f"decode-keys-{N}", B=1, H_q=4, H_kv=2, M=1, N=N, D=32, D_v=32)
            for N in lengths
        ),
        *(
            Case(name=f"decode-group-{group}-queries-{M}", H_q=2 * group, M=M, N=577, D=16, D_v=16,
                 mask=CAUSAL_END)
            for group, M in lanes
        ),
        *(
            Case(name=f"decode-widths-{D}-{D_v}", B=1, H_q=6, H_kv=2, M=1, N=131, D=D, D_v=D_v)
            for D, D_v in widths
        ),
    ]  # fmt: skip


def _masks() -> list[Case]:
    masks: dict[str, Constraints] = {
        "causal": CAUSAL,
        "causal-bottom-right": CAUSAL_END,
        "window": Window(70, 3, "bottom_right"),
        "window-ahead": Window(-SPLIT, None),
        "window-out-of-sight": Window(None, -50),
        "dense": Dense("bhmn"),
        "dense-shared": Dense("mn"),
        "dense-keys": Dense("b11n"),
        "dense-heads": Dense("1hm1"),
        "dense-transposed": Dense("b1mn", 50, transposed=True),
        "blocks": Blocks(3, by_head=True),
        "segments-causal": (MIXED, CAUSAL_END),
        "all-kinds": (Window(1100, 10, "bottom_right"), MIXED, Dense("1hmn")),
    }
    may_be_nan = {"padding": padding(1201), "key-range": key_range(1201), "segments": MIXED}
    return [
        *(
            Case(name=f"decode-{name}", H_q=8, M=4, N=1201, mask=mask, dlse=True)
            for name, mask in masks.items()
        ),
        *(
            Case(name=f"decode-{name}-{hidden or 0.0}", B=4, H_q=4, M=2, N=1201, mask=mask,
                 hidden=hidden)
            for name, mask in may_be_nan.items()
            for hidden in HIDDEN
        ),
    ]  # fmt: skip


def _options() -> list[Case]:
    return [
        *(
            Case(name=f"decode-bias-{shape}", H_q=4, M=3, N=600, bias=shape, dlse=True)
            for shape in ("bhmn", "1hmn", "b1mn", "bh1n", "bhm1", "11mn", "1111")
        ),
        Case(name="decode-bias-float32", H_q=4, M=1, N=600, bias="b1mn", bias_is_float32=True),
        Case(name="decode-bias-hides", H_q=4, M=4, N=600, bias="11mn", bias_hides=True),
        Case(name="decode-bias-transposed", M=3, N=600, bias="bhmn", layout="transposed"),
        Case(name="decode-alibi", H_q=8, M=2, N=600, alibi="top_left", mask=CAUSAL),
        Case(name="decode-alibi-end", H_q=8, M=2, N=600, alibi="bottom_right"),
        Case(name="decode-softcap", H_q=8, M=1, N=600, softcap=1.5, dlse=True),
        Case(name="decode-softcap-bias", H_q=4, M=2, N=600, softcap=0.7, bias="1hmn"),
        Case(name="decode-scale-negative", M=1, N=600, scale=-0.2),
        Case(name="decode-scale-zero", M=1, N=600, scale=0.0),
        Case(name="decode-steep", H_q=4, M=2, N=1201, scale=1.0),
        Case(name="decode-dropout", H_q=8, M=1, N=600, dropout_p=0.1),
        Case(name="decode-dropout-all", H_q=4, M=2, N=600, dropout_p=1.0, dlse=True),
        Case(name="decode-dropout-queries", H_q=4, M=4, N=600, dropout_p=0.3, mask=padding(600)),
        Case(name="decode-tiles", H_q=6, M=18, N=600, mask=Dense("bhmn"), bias="bhmn",
             dropout_p=0.2),
        Case(name="decode-tiles-heads", H_q=14, M=5, N=600, bias="1hmn", dropout_p=0.2, dlse=True,
             mask=(MIXED, Dense("1hmn"))),
        Case(name="decode-sinks", H_q=4, M=1, N=600, sinks=True, mask=padding(600)),
        Case(name="decode-everything", H_q=8, M=2, N=1201, D=24, D_v=17, layout="transposed",
             mask=(CAUSAL_END, padding(1201)), bias="1hmn", softcap=2.0, dropout_p=0.2,
             sinks=True, dlse=True),
        *(
            Case(name=f"decode-{layout}", H_q=4, M=2, N=600, D=32, D_v=24, layout=layout)
            for layout in ("transposed", "strided", "unaligned", "expanded")
        ),
    ]  # fmt: skip


CASES = (*_sizes(), *_masks(), *_options())


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned", "isa")
@pytest.mark.parametrize(
    ("case", "isa", "dtype"),
    crossed(CASES, itertools.product(ISAS, DTYPES)),
    indirect=["isa"],
)
def test_case(case: Case, dtype: torch.dtype) -> None:
    """o, lse and gradients."""
    assert_case(case, dtype, "cpu")


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    """With one head all threads share its splits, which finish in any order."""
    case = Case(name="decode-threads", B=1, H_q=1, H_kv=1, M=1, N=8 * SPLIT + 3, D=64, D_v=64)
    results = []
    for count in (1, 2, 3, 8, 8, 8):
        torch.set_num_threads(count)
        results.append(case.run(case.inputs(dtype), "cpu"))
    for other in results[1:]:
        for name, x in results[0].items():
            assert torch.equal(other[name], x), name


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("j", [0, SPLIT + 88, 2 * SPLIT + 175])
def test_visible_nan_propagates_to_every_row(where: str, j: int, isa: str) -> None:
    q, k, v = (torch.randn(1, 2, length, 16) for length in (2, 1200, 1200))
    (k if where == "k" else v)[0, 1, j, 3] = math.nan
    o, lse = tk.attention(q, k, v, return_lse=True, backend="cpu")
    assert not o[0, 0].isnan().any()
    assert o[0, 1].isnan().any(dim=-1).all()
    assert lse.isnan()[0].tolist() == [[False] * 2, [where == "k"] * 2]


def test_the_largest_score_may_be_in_any_split(isa: str) -> None:
    """Weights below 2^-150 of the largest underflow to 0, before and after it."""
    k = torch.zeros(4, 1, 4 * SPLIT, 8)
    v = torch.randn(4, 1, 4 * SPLIT, 8)
    for b in range(4):
        k[b, 0, b * SPLIT + 77] = 100.0
    q = torch.full((4, 1, 1, 8), 2.0)
    o = tk.attention(q, k, v, backend="cpu")
    exact = torch.stack([v[b, :, b * SPLIT + 77] for b in range(4)])[:, :, None]
    assert torch.equal(o, exact)


PEAK = """
import pathlib, re, torch, transformer_kernels as tk
def peak():  # in MiB; getrusage would include the parent process
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024
torch.set_num_threads(2)
q = torch.randn(1, 4, 1, 64).bfloat16()
k, v = (torch.zeros(1, 1, N, 64, dtype=torch.bfloat16) for N in (1 << 18, 1 << 18))
tk.attention(q, k[:, :, :1000], v[:, :, :1000], backend="cpu")
before = peak()
tk.attention(q, k, v, backend="cpu")
print(peak() - before)
"""


@pytest.mark.exhaustive
def test_keys_and_values_are_read_in_place() -> None:
    """k and v are 32 MiB each; packed copies would double that."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK],
        check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert int(run.stdout) < 8
