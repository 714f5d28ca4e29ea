"""Padding: `clear_padding`, `masked_mean` and checks of the lengths."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn.masking import check_lengths, clear_padding, masked_mean


def x() -> Tensor:
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mean_excludes_padding(dtype: torch.dtype) -> None:
    lengths = torch.tensor([5, 1, 3], dtype=dtype)
    expected = torch.stack([x()[b, :length].mean(dim=0) for b, length in enumerate([5, 1, 3])])
    assert_same_function(masked_mean(x(), lengths), expected)
    assert not torch.allclose(x().mean(dim=1), expected)


def test_without_lengths_nothing_is_padding() -> None:
    assert_same_function(masked_mean(x(), None), x().mean(dim=1))
    assert torch.equal(clear_padding(x(), None), x())


def test_mean_of_an_empty_sequence_is_zero() -> None:
    lengths = torch.tensor([0, 5, 0])
    assert masked_mean(x(), lengths)[[0, 2]].tolist() == [[0.0] * 4] * 2
    assert masked_mean(x()[:, :0], None).tolist() == [[0.0] * 4] * 3


def test_nan_in_padding_reaches_no_result_and_no_gradient() -> None:
    lengths = torch.tensor([5, 1, 3])
    inputs = x()
    inputs[1, 1:] = inputs[2, 3:] = math.nan
    inputs.requires_grad_()
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = clear_padding(inputs, lengths) * weight
    gradients = torch.autograd.grad(
        y.square().sum() + masked_mean(y, lengths).sum(), [inputs, weight]
    )
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
