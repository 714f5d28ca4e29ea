from __future__ import annotations

import pytest

from benchmarks.conftest import pytest_exception_interact
from transformer_kernels.bench.trial import DeviceLostError


def raising(error: Exception) -> pytest.CallInfo[None]:
    def function() -> None:
        raise error

    return pytest.CallInfo.from_call(function, when="call")


def test_a_lost_device_ends_the_run() -> None:
    pytest_exception_interact(raising(AssertionError("wrong")))
    with pytest.raises(pytest.exit.Exception, match="the device is lost"):
        pytest_exception_interact(raising(DeviceLostError("the device is lost")))
