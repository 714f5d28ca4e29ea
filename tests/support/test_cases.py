"""The table of cases on other devices; the "meta" device is always available."""

from __future__ import annotations

import torch

from tests.support.cases import CASES, Case, inputs, plant
from tests.support.tiers import each

META = torch.device("meta")


@each("case", CASES, ids=str)
def test_inputs_have_the_same_layout_on_every_device(case: Case) -> None:
    on_cpu, on_meta = (vars(inputs(case, torch.bfloat16, device)) for device in ("cpu", META))
    assert on_cpu.keys() == on_meta.keys()
    for name, x in on_cpu.items():
        if x is None:
            assert on_meta[name] is None
            continue
        y = on_meta[name]
        assert y.device == META
        assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, x.requires_grad)
        assert (y.stride(), y.storage_offset()) == (x.stride(), x.storage_offset())


@each("case", [case for case in CASES if case.mask], ids=str)
def test_masks_are_on_the_device(case: Case) -> None:
    mask, visible = case.make_mask(META), case.visible(META)
    assert mask is not None
    assert visible is not None
    assert {x.device for _, x in mask.tensors()} <= {META}
    assert visible.device == META


@each("case", [case for case in CASES if case.hidden], ids=str)
def test_planted_inputs_are_on_the_device(case: Case) -> None:
    planted = plant(case, inputs(case, torch.float32, META))
    assert {x.device for x in planted.differentiable().values()} == {META}
