from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from transformer_kernels.bench import Case, Direction
from transformer_kernels.masks.mask import Mask

CASE = Case(name="causal", B=2, H_q=4, H_kv=2, M=6, N=8, D=3, D_v=5, mask=Mask.causal())


def test_visible_is_the_fraction_of_visible_pairs() -> None:
    assert CASE.visible == (1 + 2 + 3 + 4 + 5 + 6) / (6 * 8)
    lengths = Mask.padding(torch.tensor([1, 4]))
    assert Case(name="padding", B=2, M=4, N=4, mask=lengths).visible == 5 / 8
    assert Case(name="full", M=4, N=4).visible == 1.0


def test_a_case_moves_with_all_its_tensors() -> None:
    bias = torch.zeros(2, 4, 6, 8, requires_grad=True)
    case = replace(CASE, mask=Mask.padding(torch.tensor([1, 4])), bias=bias)
    meta = case.to(torch.device("meta"))
    assert meta.mask is not None
    assert {x.device.type for _, x in meta.mask.tensors()} == {"meta"}
    assert [(x.device.type, x.requires_grad) for x in meta.learned] == [("meta", True)]
    assert replace(meta, mask=case.mask, bias=bias, device=case.device) == case
    assert [x.shape for x in CASE.to(torch.device("cpu")).inputs()] == [
        x.shape for x in CASE.inputs()
    ]


@pytest.mark.parametrize(
    ("direction", "widths"), [("fwd", 8), ("bwd", 3 * 3 + 2 * 5), ("fwd+bwd", 8 + 19)]
)
def test_operations_count_visible_pairs_only(direction: Direction, widths: int) -> None:
    pairs = 2 * 4 * 21
    assert CASE.operations(direction) == pytest.approx(2 * pairs * widths)


def test_traffic_counts_every_tensor_once() -> None:
    q, k, v, do = (x.numel() * 4 for x in CASE.inputs())
    assert CASE.traffic("fwd") == q + k + v + do
    assert CASE.traffic("bwd") == 2 * (q + k + v + do)
    assert CASE.traffic("fwd+bwd") == 3 * (q + k + v + do)


def test_inputs_are_normal_and_have_the_dtype_and_shapes_of_the_case() -> None:
    case = Case(name="full", H_q=4, H_kv=2, M=64, N=128, D=16, D_v=24, dtype=torch.bfloat16)
    q, k, v, do = case.inputs()
    assert (q.shape, k.shape) == ((1, 4, 64, 16), (1, 2, 128, 16))
    assert (v.shape, do.shape) == ((1, 2, 128, 24), (1, 4, 64, 24))
    for x in (q, k, v, do):
        assert x.dtype == torch.bfloat16
        assert 0.9 < float(x.double().std()) < 1.1
    assert not torch.equal(q[:, :2], k[:, :, :64])
    assert torch.equal(q, case.inputs().q)
