"""The table of cases on other devices; "meta" stands for one that is always there."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import CASES, Case, inputs, plant

META = torch.device("meta")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_lie_on_the_device_as_they_do_on_the_cpu(case: Case) -> None:
    here, there = (vars(inputs(case, torch.bfloat16, device)) for device in ("cpu", META))
    assert here.keys() == there.keys()
    for name, x in here.items():
        if x is None:
            assert there[name] is None
            continue
        y = there[name]
        assert y.device == META
        assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, x.requires_grad)
        assert (y.stride(), y.storage_offset()) == (x.stride(), x.storage_offset())


@pytest.mark.parametrize("case", [case for case in CASES if case.mask], ids=str)
def test_masks_are_on_the_device(case: Case) -> None:
    mask, shown = case.bound_mask(META), case.shown(META)
    assert mask is not None
    assert shown is not None
    assert {x.device for _, x in mask.tensors()} <= {META}
    assert shown.device == META


@pytest.mark.parametrize("case", [case for case in CASES if case.hidden], ids=str)
def test_what_is_planted_is_on_the_device(case: Case) -> None:
    planted = plant(case, inputs(case, torch.float32, META))
    assert {x.device for x in planted.differentiable().values()} == {META}
