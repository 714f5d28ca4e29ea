"""Padding of batches, and `nn.MaskBuffer`, a mask that follows its module."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import MaskBuffer
from transformer_kernels.nn.masking import check_lengths, clear_padding, masked_mean


def inputs() -> Tensor:
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mean_excludes_padding(dtype: torch.dtype) -> None:
    lengths = torch.tensor([5, 1, 3], dtype=dtype)
    expected = torch.stack([inputs()[b, :length].mean(dim=0) for b, length in enumerate([5, 1, 3])])
    assert_same_function(masked_mean(inputs(), lengths), expected)
    assert not torch.allclose(inputs().mean(dim=1), expected)


def test_without_lengths_nothing_is_padding() -> None:
    assert_same_function(masked_mean(inputs(), None), inputs().mean(dim=1))
    assert torch.equal(clear_padding(inputs(), None), inputs())


def test_mean_of_an_empty_sequence_is_zero() -> None:
    lengths = torch.tensor([0, 5, 0])
    assert masked_mean(inputs(), lengths)[[0, 2]].tolist() == [[0.0] * 4] * 2
    assert masked_mean(inputs()[:, :0], None).tolist() == [[0.0] * 4] * 3


def test_nan_in_padding_reaches_no_result_and_no_gradient() -> None:
    lengths = torch.tensor([5, 1, 3])
    x = inputs()
    x[1, 1:] = x[2, 3:] = math.nan
    x.requires_grad_()
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = clear_padding(x, lengths) * weight
    gradients = torch.autograd.grad(y.square().sum() + masked_mean(y, lengths).sum(), [x, weight])
    assert y.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][1, 1:].tolist() == [[0.0] * 4] * 4


@each(
    ("lengths", "error", "message"),
    [
        ([1, 2, 3], TypeError, "it must be a tensor of int32 or int64, got list"),
        (torch.ones(3), TypeError, "it must be a tensor of int32 or int64, got torch.float32"),
        (torch.ones(3).bool(), TypeError, "it must be a tensor of int32 or int64, got torch.bool"),
        (torch.tensor([1, 2]), ValueError, "it must be (batch,) = (3,), got shape (2,)"),
        (torch.tensor([[1, 2, 3]]), ValueError, "it must be (batch,) = (3,), got shape (1, 3)"),
        (
            torch.tensor([1, 6, 3]),
            ValueError,
            "it must be from 0 to 5, the padded length, got 6 at index 1",
        ),
        (
            torch.tensor([1, 5, -1]),
            ValueError,
            "it must be from 0 to 5, the padded length, got -1 at index 2",
        ),
    ],
)
def test_invalid_lengths_raise(lengths: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check_lengths("it", lengths, batch=3, max_length=5)


def test_valid_lengths_pass() -> None:
    check_lengths("it", None, batch=3, max_length=5)
    check_lengths("it", torch.tensor([0, 5, 1], dtype=torch.int32), batch=3, max_length=5)


T = 7
IDS, LENGTHS = torch.arange(T)[None] // 3, torch.tensor([5])
EVERY_KIND = (
    tk.Mask.window(4, 1, align="bottom_right")
    & tk.Mask.padding(LENGTHS)
    & tk.Mask.key_range(LENGTHS - 4, LENGTHS)
    & tk.Mask.segments(IDS)
    & tk.Mask.segments(IDS + torch.arange(T), IDS, equal=False)
    & tk.Mask.positions(IDS, IDS + 1, 2, 3)
    & tk.Mask.dense(torch.rand(T, T) > 0.3)
    & tk.Mask.block_sparse(torch.ones(4, 4, dtype=torch.bool), 2)
)
TENSORS = 11


class Attention(nn.Module):
    def __init__(self, mask: tk.Mask, **options: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.mask = MaskBuffer(mask, **options)

    def forward(self, q: Tensor) -> Tensor:
        return tk.attention(q, q, q, mask=self.mask())


def test_it_holds_every_kind_of_mask() -> None:
    mask = MaskBuffer(EVERY_KIND)()
    assert [type(one) for one in mask.constraints] == [type(one) for one in EVERY_KIND.constraints]
    assert len(mask.tensors()) == TENSORS
    assert torch.equal(mask.materialize(1, 2, T, T), EVERY_KIND.materialize(1, 2, T, T))
    assert MaskBuffer(tk.Mask())().constraints == ()


def test_it_moves_with_the_module() -> None:
    module = Attention(EVERY_KIND).half()
    assert {x.dtype for _, x in module.mask().tensors()} == {torch.int64, torch.bool}
    assert copy.deepcopy(module).to("meta").mask().device == torch.device("meta")
    assert {x.device.type for _, x in module.to("meta").mask().tensors()} == {"meta"}
    empty = module.to_empty(device="cpu").mask()
    assert [(name, x.shape, x.dtype) for name, x in empty.tensors()] == [
        (name, x.shape, x.dtype) for name, x in EVERY_KIND.tensors()
    ]


def test_it_is_in_the_state_dict_on_request() -> None:
    assert (
        Attention(EVERY_KIND).state_dict().keys()
        == nn.ModuleDict({"proj": nn.Linear(4, 4)}).state_dict().keys()
    )
    saved = Attention(tk.Mask.causal() & tk.Mask.padding(LENGTHS), persistent=True).state_dict()
    other = Attention(tk.Mask.causal() & tk.Mask.padding(LENGTHS - 2), persistent=True)
    other.load_state_dict(saved)
    assert torch.equal(saved["mask.end_1"], LENGTHS)
    assert torch.equal(other.mask().tensors()[0][1], LENGTHS)


def test_compiled_code() -> None:
    module, q = Attention(EVERY_KIND), torch.randn(1, 2, T, 4)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), tk.attention(q, q, q, mask=EVERY_KIND))


def test_errors_name_the_argument() -> None:
    with pytest.raises(TypeError, match="mask must be a Mask, got None"):
        MaskBuffer(None)  # type: ignore[arg-type]
