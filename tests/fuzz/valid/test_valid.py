"""Valid calls: their source, and checks that pass and fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.calls import Call, parse
from tests.fuzz.valid.call import SdpaCase, Valid
from tests.fuzz.valid.draw import decode, delta, dense, linear, sdpa, valid_calls, varlen
from tests.support.attention import Relative
from tests.support.cases import Case
from tests.support.decode_cases import DecodeCase
from tests.support.delta import DeltaCase
from tests.support.linear import LinearCase
from tests.support.masks import (
    CAUSAL,
    CAUSAL_END,
    Blocks,
    Dense,
    Intervals,
    KeyRange,
    Positions,
    Segments,
    Selected,
    Sizes,
    Window,
)
from tests.support.tiers import each
from tests.support.varlen_cases import VarlenCase

WINDOW = Window(-2, 3, "bottom_right")
EVERY_MASK = (
    WINDOW,
    KeyRange(start=(3, 1), end=(33, 3)),
    Segments(count=2, ordered=False),
    Segments(length=7, without=(2, 3), gap=(4, 6), equal=False),
    Positions(4, 3, "bh", "b", "shuffled"),
    Dense("bhmn", share=90, byte=255),
    Blocks(7, by_head=True, share=90),
    Intervals("low", False, "bh", "h", 3),
    Selected(20, 3, "h"),
)
LENGTHS = ((5, 7), (0, 3), (33, 40))
BELOW = Relative(9, -4, "bottom_right")
SMALL: dict[str, Any] = {"B": 2, "H_q": 2, "H_kv": 2, "M": 33, "N": 40, "D": 8, "D_v": 8}
CASES = (
    Case(
        **SMALL | {"H_q": 4}, mask=EVERY_MASK[:2], hidden="nan", bias="b1mn", bias_hides=True,
        sinks=True, softcap=5.0, dropout_p=0.3, layout="strided", dlse=True, deviation=10.0,
    ),
    Case(**SMALL, relative=Relative(9, -4, shared=True), dlse=True, alibi="top_left"),
    Case(**SMALL, relative=Relative(9, -4, kind="both"), dlse=True, softcap=5.0),
    Case(
        H_q=2, H_kv=1, M=33, N=40, relative=Relative(40, shared=True, kind="keys"),
        requires_grad=("q", "keys"), alibi="bottom_right", alibi_by_entry=True,
    ),
    VarlenCase(lengths=LENGTHS, mask=WINDOW, requires_grad=("v", "table"), relative=BELOW),
    VarlenCase(
        lengths=LENGTHS, mask=WINDOW, H_q=4, relative=Relative(9, -4, "bottom_right", kind="keys"),
        alibi="bottom_right", requires_grad=("q", "keys", "slopes"),
    ),
    VarlenCase(
        lengths=LENGTHS, trailing=(3, 3), mask=WINDOW, sinks=True, dropout_p=0.9, dlse=True,
        index="int32",
    ),
    DecodeCase(
        cache_seqlens=(70, 3), M=2, relative=Relative(9, 0, "bottom_right", kind="both"), N=70,
    ),
    DecodeCase(cache_seqlens=(70, 0, 3), N=75, M=2, page_size=20, alibi="bottom_right"),
    DecodeCase(
        cache_seqlens=(70, 0, 9), N=70, M=3, alibi="bottom_right", alibi_by_entry=True,
        mask=(CAUSAL_END, KeyRange(start=(9, 0, -2), end=(60, 5, 99))), return_lse=False,
    ),
    DecodeCase(cache_seqlens=(70, 1), M=2, N=70, mask=Window(9, 0, "bottom_right")),
    LinearCase(N=70, H_q=4, decay="token", state=True, mask=KeyRange(end=(40, 70))),
    LinearCase(packed=(5, 0, 40), trailing=3, feature_map="identity", normalize=False),
    LinearCase(steps=(1, 33), decay="head", layout="strided", feature_map="relu", eps=0.5),
    DeltaCase(T=70, H_v=4, gate="channel", state=True),
    DeltaCase(packed=(5, 0, 40), trailing=3, l2norm=True),
    DeltaCase(steps=(1, 33), layout="strided", gate="reset"),
    SdpaCase(**SMALL, mask=(EVERY_MASK[5], CAUSAL), replaced=True, requires_grad=("k",)),
)  # fmt: skip
CALLS = (
    *(Valid(case=case, poisoned=True) for case in CASES),
    Valid(
        case=SdpaCase(requires_grad=(), B=1, H_q=1, H_kv=1, M=5, N=5, D=8, D_v=8, bias="mn"),
        dtype="bfloat16",
    ),
    Valid(case=Case(M=5, N=70, H_q=3, H_kv=1, mask=EVERY_MASK[5:]), dtype="float64"),
    Valid(  # identical keys
        case=DeltaCase(
            B=1, H_k=1, H_v=1, T=0, D=16, packed=(0, 0, 112), gate="none", layout="expanded"
        ),
        dtype="float64",
    ),
)


@each("call", CALLS, ids=lambda call: type(call.case).__name__)
def test_calls_pass(call: Valid) -> None:
    call.check()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call.case).__name__)
def test_every_wrong_result_is_found(call: Valid, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of each result in turn is off by 5% of the largest."""
    right = call.results()
    for name in right:
        wrong = {key: x.contiguous().clone() for key, x in right.items()}
        x = wrong[name]
        at = int(x.masked_fill(~x.isfinite(), 0).abs().argmax())
        x.view(-1)[at] *= 1.05
        monkeypatch.setattr(type(call), "results", lambda _, wrong=wrong: wrong)
        with pytest.raises(AssertionError, match=rf"^{name}: 1 of"):
            call.check()
        x.view(-1)[at] = torch.nan
        with pytest.raises(AssertionError, match=rf"^{name}: 1 of"):
            call.check()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.one_of(
        valid_calls("cpu", dense, varlen, decode, sdpa, linear, delta),
        *(valid_calls(name, dense) for name in ("cuda", "triton", "reference")),
    )
)
def test_the_repr_is_the_source(call: Call) -> None:
    assert parse(repr(call)) == call


@pytest.mark.parametrize("constraint", EVERY_MASK, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("sizes", [Sizes(3, 2, 33, 40), Sizes(1, 1, 40, 7), Sizes(2, 1, 1, 9)])
def test_masks_show_what_materialize_says(constraint: Any, sizes: Sizes) -> None:
    visible = constraint.visible(sizes).expand(sizes)
    assert torch.equal(constraint.mask(sizes).materialize(*sizes), visible)
