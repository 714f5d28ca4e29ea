"""Operators called directly check the shapes of position tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.backends import COMPILED_BACKENDS, operators_of
from tests.support.operators import operator_arguments

B, H, M, N, D = 2, 2, 5, 9, 4


def positions(tests: int = 1, batch: int = B, heads: int = 1, M: int = M, N: int = N) -> Any:
    q, k = (torch.zeros(tests, batch, heads, length).long() for length in (M, N))
    return {"q_low": q, "q_high": q, "k_position": k}


def forward(backend: str, **options: Any) -> Tensor:
    q, k, v = (torch.randn(B, H, length, D) for length in (M, N, N))
    arguments = operator_arguments(q, k, v, **options)
    o: Tensor = operators_of(backend).attention_forward(**arguments)[0]
    return o


TOGETHER = "q_low, q_high and k_position must be given together"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no-low": (positions() | {"q_low": None}, TOGETHER),
    "no-high": (positions() | {"q_high": None}, TOGETHER),
    "no-position": (positions() | {"k_position": None}, TOGETHER),
    "no-tests": (positions(tests=0), "q_low must hold at least one position test"),
    "counts": (positions() | {"k_position": positions(tests=2)["k_position"]}, "k_position must"),
    "highs": (positions() | {"q_high": positions(heads=H)["q_high"]}, "must have the same shape"),
    "batch": (positions(batch=3), "q_low must be"),
    "heads": (positions(heads=3), "q_low must be"),
    "queries": (positions(M=M - 1), "q_low must be"),
    "keys": (positions(N=N + 1), "k_position must be"),
    "3d": ({name: x[0] for name, x in positions().items()}, "q_low must be"),
    "int32": ({name: x.int() for name, x in positions().items()}, "q_low must be .* int64"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_misfits_are_refused(name: str, backend: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        forward(backend, **options)


@pytest.mark.parametrize(
    "sizes", [{"batch": 1}, {"heads": H}, {"batch": 1, "heads": H, "tests": 3}]
)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_broadcast_sizes_are_accepted(sizes: dict[str, int], backend: str) -> None:
    assert forward(backend, **positions(**sizes)).isfinite().all()
