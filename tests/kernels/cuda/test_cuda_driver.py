from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from transformer_kernels.backends.native.cuda_driver import cuda_driver_version


@pytest.mark.parametrize(("status", "expected"), [(0, (12, 8)), (3, None)])
def test_version_is_that_of_the_driver(
    status: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_version(pointer: Any) -> int:
        pointer._obj.value = 12080
        return status

    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version)
    )
    assert cuda_driver_version() == expected


def test_no_driver_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda_driver_version() is None
