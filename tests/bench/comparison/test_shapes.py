from __future__ import annotations

import pytest

from tests.support.tiers import each
from transformer_kernels.bench.comparison.shapes import Shape


def test_sizes_are_in_the_order_of_the_help() -> None:
    shape = Shape.parse("2,32,8,1,4096,128")
    assert shape == Shape(B=2, H_q=32, H_kv=8, M=1, N=4096, D=128, D_v=128)
    assert Shape.parse(" 2, 4,4 ,16,16,192,128").D_v == 128


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2,32,8,1,4096,128", "B 2, H 32/8, S 1 x 4096, D 128"),
        ("1,8,8,64,64,192,128", "B 1, H 8, S 64, D 192/128"),
    ],
)
def test_equal_sizes_are_shown_once(text: str, shown: str) -> None:
    assert str(Shape.parse(text)) == shown


@each(
    ("text", "message"),
    [
        ("", "expected B,H_q,H_kv"),
        ("1,8,8,64,64", "expected B,H_q,H_kv"),
        ("1,8,8,64,64,64,64,64", "expected B,H_q,H_kv"),
        ("1,8,8,64,64,-1", "expected B,H_q,H_kv"),
        ("1,8,8,64,64,²", "expected B,H_q,H_kv"),
        ("1,8,8,64,6e4,64", "expected B,H_q,H_kv"),
        ("1,8,8,0,64,64", "M must be at least 1, got 0"),
        ("1,8,3,64,64,64", "H_q must be a multiple of H_kv, got 8 and 3"),
    ],
)
def test_other_texts_are_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape.parse(text)
