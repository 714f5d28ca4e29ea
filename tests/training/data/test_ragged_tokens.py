"""Tests of RaggedTokens."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels.training.data.ragged_tokens import RaggedTokens


def rows(*lengths: int, largest: int = 9) -> list[torch.Tensor]:
    return [torch.randint(1, largest + 1, (length,)) for length in lengths]


def test_rows_round_trip() -> None:
    given = rows(3, 0, 5, 1)
    ragged = RaggedTokens.of(given)
    assert len(ragged) == 4
    for number, row in enumerate(given):
        assert torch.equal(ragged[number], row)


def test_rows_are_gathered_in_the_given_order_and_padded() -> None:
    given = rows(3, 0, 5, 1)
    tokens, lengths = RaggedTokens.of(given).padded(torch.tensor([3, 0, 1, 3]))
    assert lengths.tolist() == [1, 3, 0, 1]
    assert tokens.shape == (4, 3)
    assert tokens[1].tolist() == given[0].tolist()
    assert tokens[0].tolist() == tokens[3].tolist() == [int(given[3]), 0, 0]
    assert tokens[2].tolist() == [0, 0, 0]


def test_empty_row_indices_give_an_empty_batch() -> None:
    tokens, lengths = RaggedTokens.of(rows(2)).padded(torch.empty(0, dtype=torch.int64))
    assert tokens.shape == (0, 0)
    assert lengths.shape == (0,)


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(255, torch.uint8), (256, torch.int16), (32_767, torch.int16), (32_768, torch.int32)],
)
def test_values_have_the_narrowest_dtype(largest: int, dtype: torch.dtype) -> None:
    ragged = RaggedTokens.of([torch.tensor([largest, 0]), torch.tensor([1])])
    assert ragged.values.dtype == dtype
    assert ragged[0].tolist() == [largest, 0]
