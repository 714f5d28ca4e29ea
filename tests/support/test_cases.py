"""The tables of cases on other devices, of which "meta" is always available, and their oracles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support.attention import AttentionCase
from tests.support.case import AnyCase
from tests.support.cases import CASES, Case
from tests.support.decode_cases import DECODE_CASES
from tests.support.linear import LINEAR_CASES
from tests.support.tiers import each
from tests.support.varlen_cases import VARLEN_CASES

META = torch.device("meta")
TABLES: tuple[Sequence[AnyCase], ...] = (CASES, VARLEN_CASES, DECODE_CASES, LINEAR_CASES)


@pytest.mark.parametrize("cases", TABLES, ids=lambda cases: type(cases[0]).__name__)
def test_names_are_unique(cases: Sequence[AnyCase]) -> None:
    assert len({case.name for case in cases}) == len(cases)


@each("case", [*CASES, *VARLEN_CASES, *DECODE_CASES], ids=str)
def test_inputs_have_the_same_layout_on_every_device(case: AttentionCase) -> None:
    on_cpu, on_meta = (vars(case.inputs(torch.bfloat16, device)) for device in ("cpu", META))
    for name, x in on_cpu.items():
        y = on_meta[name]
        if x is None:
            assert y is None
            continue
        assert y.device == META
        assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, x.requires_grad)
        assert (y.stride(), y.storage_offset()) == (x.stride(), x.storage_offset())


@each("case", [case for case in CASES if case.mask is not None], ids=str)
def test_masks_are_on_the_device_and_show_what_is_defined(case: Case) -> None:
    mask, there = case.make_mask(), case.make_mask(META)
    assert mask is not None
    assert there is not None
    assert {x.device for _, x in there.tensors()} <= {META}
    assert torch.equal(mask.materialize(*case.sizes), case.visible())
