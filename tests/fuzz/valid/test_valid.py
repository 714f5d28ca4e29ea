"""Valid calls: their source, and checks that pass and fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.call import Call
from tests.fuzz.calls import parse
from tests.fuzz.valid.attention import Attention, attention_calls
from tests.fuzz.valid.base import Valid
from tests.fuzz.valid.decode import Decode, decode_calls
from tests.fuzz.valid.masks import Blocks, Dense, KeyRange, Segments, Sizes, Window
from tests.fuzz.valid.relative import Relative
from tests.fuzz.valid.sdpa import Sdpa, sdpa_calls
from tests.fuzz.valid.varlen import Varlen, varlen_calls
from tests.support.tiers import each

EVERY_MASK = (
    Window(left=-2, right=3, align="bottom_right"),
    KeyRange(start=(3, 1), length=(30, 2)),
    Segments(count=2, ordered=False),
    Dense(dims="bhmn", share=90, byte=255),
    Blocks(size=7, by_head=True, share=90),
)
CALLS = (
    Attention(
        B=2, H_kv=2, group=2, M=33, N=40, mask=EVERY_MASK[:2], hidden=True, bias="bmn",
        bias_hides=True, sinks=True, softcap=5.0, dropout_p=0.3, layout="strided",
        requires_grad=("q", "k", "v", "bias", "sinks"), return_lse=True, deviation=10.0,
    ),
    Attention(M=5, N=70, group=3, mask=EVERY_MASK[3:], alibi_align="top_left", dtype="float64"),
    Attention(
        B=2, H_kv=2, M=33, N=40, relative=Relative(entries=9, lowest=-4, shared=True),
        requires_grad=("q", "k", "v", "table"), return_lse=True,
    ),
    Varlen(M=(5, 0, 33), N=(7, 3, 40), window=EVERY_MASK[0], requires_grad=("v", "table"),
           relative=Relative(entries=9, lowest=-4, align="bottom_right")),
    Decode(cache_seqlens=(70, 3), M=2, relative=Relative(entries=9, align="bottom_right")),
    Attention(
        B=2, H_kv=2, group=2, M=33, N=40, relative=Relative(entries=9, lowest=-4, kind="both"),
        requires_grad=("q", "k", "v", "table", "keys"), return_lse=True, softcap=5.0,
    ),
    Attention(
        M=33, N=40, relative=Relative(entries=40, shared=True, kind="keys"), group=2,
        requires_grad=("q", "keys"),
    ),
    Varlen(M=(5, 0, 33), N=(7, 3, 40), window=EVERY_MASK[0], requires_grad=("q", "keys"), group=2,
           relative=Relative(entries=9, lowest=-4, align="bottom_right", kind="keys")),
    Decode(cache_seqlens=(70, 3), M=2,
           relative=Relative(entries=9, align="bottom_right", kind="both")),
    Varlen(M=(5, 0, 33), N=(7, 3, 40), trailing=3, window=EVERY_MASK[0], sinks=True,
           dropout_p=0.9, requires_grad=("q", "k", "v", "sinks"), return_lse=True, poisoned=True),
    Decode(cache_seqlens=(70, 0, 3), spare=5, M=2, page_size=20, alibi=True, return_lse=True),
    Decode(cache_seqlens=(70, 0, 9), M=3, key_ranges=((9, 60), (0, 5), (-2, 99)), alibi=True,
           alibi_by_sequence=True),
    Decode(cache_seqlens=(70, 1), M=2, window=Window(left=9, right=0, align="bottom_right")),
    Sdpa(M=33, N=40, mask=(EVERY_MASK[3], Window(right=0)), replaced=True, requires_grad=("k",)),
    Sdpa(M=5, N=5, bias="mn", dtype="bfloat16"),
)  # fmt: skip


@each("call", CALLS, ids=lambda call: type(call).__name__)
def test_calls_pass(call: Valid) -> None:
    call.check()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
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
        *(attention_calls(name) for name in ("cpu", "cuda", "triton", "reference")),
        *(varlen_calls("cpu"), decode_calls("cpu"), sdpa_calls()),
    )
)
def test_the_repr_is_the_source(call: Call) -> None:
    assert parse(repr(call)) == call


@pytest.mark.parametrize("constraint", EVERY_MASK, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("sizes", [Sizes(3, 2, 33, 40), Sizes(1, 1, 40, 7), Sizes(2, 1, 1, 9)])
def test_masks_show_what_materialize_says(constraint: Any, sizes: Sizes) -> None:
    visible = constraint.visible(sizes).expand(sizes)
    assert torch.equal(constraint.mask(sizes).materialize(*sizes), visible)
