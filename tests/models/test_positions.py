"""Learned, row and column, and sinusoidal positions."""

from __future__ import annotations

import math

import pytest
import torch

from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    LearnedPositions,
    RowColumnPositions,
    SinusoidalPositions,
    distance_sinusoids,
    sinusoids,
)


@pytest.mark.parametrize("width", [8, 7, 1])
def test_sinusoids_follow_the_paper_at_even_and_odd_widths(width: int) -> None:
    table = sinusoids(50, width)
    assert table.shape == (50, width)
    for position in (0, 1, 49):
        for column in range(width):
            angle = position / 10000 ** (2 * (column // 2) / width)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[position, column].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("clamp", [None, 30, 49])
@pytest.mark.parametrize("width", [8, 7, 1])
def test_distance_sinusoids_are_sines_then_cosines(width: int, clamp: int | None) -> None:
    table = distance_sinusoids(50, width, clamp=clamp)
    sines = (width + 1) // 2
    assert table.shape == (50, width)
    for distance in (0, 1, 29, 30, 31, 49):
        clamped = distance if clamp is None else min(distance, clamp)
        for column in range(width):
            angle = clamped / 10000 ** (2 * (column % sines) / width)
            expected = math.sin(angle) if column < sines else math.cos(angle)
            assert table[distance, column].item() == pytest.approx(expected, abs=1e-13)


def test_invalid_distance_sinusoids_raise() -> None:
    with pytest.raises(ValueError, match="length must be a whole number of at least 1, got 0"):
        distance_sinusoids(0, 8)
    with pytest.raises(ValueError, match="clamp must be a whole number of at least 1, got 0"):
        distance_sinusoids(5, 8, clamp=0)


def test_sinusoidal_positions_are_added_and_not_saved() -> None:
    module = SinusoidalPositions(10, 5)
    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(module(x), x + sinusoids(10, 5)[:4])
    assert not module.state_dict()
    assert not list(module.parameters())


def test_learned_positions_are_added_and_trained() -> None:
    module = LearnedPositions(10, 5)
    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(module(x), x + module.table[:4])
    module(x).sum().backward()
    assert module.table.grad is not None
    assert module.table.grad[:, 0].tolist() == [2.0] * 4 + [0.0] * 6


@pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])
def test_positions_move_with_the_module(kind: type[LearnedPositions | SinusoidalPositions]) -> None:
    module = kind(10, 5).to("meta")
    assert module(torch.empty(2, 4, 5, device="meta")).device.type == "meta"


@pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])
def test_text_longer_than_the_context_raises_value_error(
    kind: type[LearnedPositions | SinusoidalPositions],
) -> None:
    with pytest.raises(ValueError, match=r"at most 3 positions long \(the context\), got 4"):
        kind(3, 5)(torch.zeros(1, 4, 5))
    with pytest.raises(ValueError, match="whole number of at least 1, got 0"):
        kind(3, 0)


@pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])
def test_positions_can_start_at_an_offset(
    kind: type[LearnedPositions | SinusoidalPositions],
) -> None:
    positions, x = kind(7, 4), torch.randn(2, 7, 4)
    torch.testing.assert_close(positions(x[:, 3:], start=3), positions(x)[:, 3:])
    with pytest.raises(ValueError, match=r"at most 7 positions long \(the context\), got 8"):
        positions(x[:, :4], start=4)


@pytest.mark.parametrize("start", [0, 5, 40])
def test_rows_and_columns_of_positions_repeat_after_the_last_row(start: int) -> None:
    positions = RowColumnPositions(rows=3, columns=4, width=5)
    x = torch.randn(2, 17, 5, generator=torch.Generator().manual_seed(0))
    added = positions(x, start=start) - x
    for t in range(17):
        p = start + t
        expected = positions.rows[p // 4 % 3] + positions.columns[p % 4]
        assert_same_function(added[:, t], expected.expand(2, -1))


def test_each_text_may_start_at_a_row_and_column_of_its_own() -> None:
    positions, x = RowColumnPositions(rows=3, columns=4, width=5), torch.randn(2, 6, 5)
    y = positions(x, start=torch.tensor([[2], [40]]))
    torch.testing.assert_close(y[0], positions(x, start=2)[0])
    torch.testing.assert_close(y[1], positions(x, start=40)[1])


@pytest.mark.parametrize("name", ["rows", "columns", "width"])
def test_sizes_of_rows_and_columns_below_one_raise_value_error(name: str) -> None:
    sizes = {"rows": 3, "columns": 4, "width": 5} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
        RowColumnPositions(**sizes)
