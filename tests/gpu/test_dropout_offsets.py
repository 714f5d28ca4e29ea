"""Parts of a call with dropout on a CUDA device: the offsets of their rows, columns and heads."""

from __future__ import annotations

import pytest
import torch

from tests.support.dropout_parts import HOPPER, Part, assert_part, assert_undivided_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", HOPPER, ids=str)
def test_part(part: Part, dtype: torch.dtype, backend: str) -> None:
    assert_part(part, backend, dtype, device="cuda")


def test_parts_have_the_bits_of_the_undivided_call(backend: str) -> None:
    assert_undivided_bits(backend, device="cuda")
