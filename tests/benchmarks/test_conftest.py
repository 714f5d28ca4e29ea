from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import conftest
from benchmarks.cases.gpu import causal
from benchmarks.conftest import pytest_collection_modifyitems, pytest_exception_interact
from tests.bench.example import row
from transformer_kernels.bench import write_rows
from transformer_kernels.bench.trial import DeviceLostError


def raising(error: Exception) -> pytest.CallInfo[None]:
    def function() -> None:
        raise error

    return pytest.CallInfo.from_call(function, when="call")


def test_a_lost_device_ends_the_run() -> None:
    pytest_exception_interact(raising(AssertionError("wrong")))
    with pytest.raises(pytest.exit.Exception, match="the device is lost"):
        pytest_exception_interact(raising(DeviceLostError("the device is lost")))


@pytest.mark.parametrize(
    ("record", "lengths"), [(True, [2048, 1024]), (False, [1024, 2048])], ids=str
)
def test_a_recorded_run_starts_with_cases_without_rows(
    record: bool, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(conftest, "device_slug", lambda _: "nvidia-h200")
    monkeypatch.setattr(conftest, "RECORDED", tmp_path)
    (tmp_path / "nvidia-h200").mkdir()
    measured = row(case=replace(causal(1024, 64), mask=None))
    write_rows(tmp_path / "nvidia-h200" / "gpu.csv", [replace(measured, variant="triton")])
    options = {"--record": record, "--variants": ["cpu", "triton"]}
    config: Any = SimpleNamespace(getoption=options.get)
    items: Any = [SimpleNamespace(name="ceiling")]
    for S in (1024, 2048):
        callspec = SimpleNamespace(params={"on_grid": causal(S, 64), "direction": "fwd"})
        items.append(SimpleNamespace(callspec=callspec))
    pytest_collection_modifyitems(config, items)
    assert items[0].name == "ceiling"
    assert [item.callspec.params["on_grid"].M for item in items[1:]] == lengths
