from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.bench.comparison_example import measured
from transformer_kernels.bench.comparison.saved import changes, load, save
from transformer_kernels.bench.contenders import Measured
from transformer_kernels.bench.rows import row_values


def scaled(one: Measured, factor: float) -> Measured:
    return replace(one, laps=tuple(factor * lap for lap in one.laps))


def test_a_saved_run_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = [measured("cpu", 2.0), measured("sdpa", 3.0, "fwd+bwd")]
    save(path, run)
    found = load(path)
    assert [one.laps for one in found] == [one.laps for one in run]
    assert [row_values(one.row) for one in found] == [row_values(one.row) for one in run]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "other"}', '{"format": "transformer_kernels.bench 1"}',
     '{"format": "transformer_kernels.bench 1", "measured": [{"row": {}, "laps": [1]}]}'],
)  # fmt: skip
def test_other_files_are_errors(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.json is not a run saved by `bench --save`"):
        load(path)


def test_measurement_without_rounds_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    save(path, [replace(measured("cpu", 2.0), laps=())])
    with pytest.raises(ValueError, match="a measurement without rounds"):
        load(path)


def test_changes_beyond_the_noise_are_found() -> None:
    before = [measured("cpu", 2.0, rounds=21), measured("naive", 9.0, rounds=21)]
    for factor, verdict in ((1.2, "slower"), (0.8, "faster"), (1.01, "same")):
        slower, same = changes(before, [scaled(before[0], factor), before[1]])
        if factor < 1.0:
            slower, same = same, slower
        assert (slower.row.variant, slower.verdict) == ("cpu", verdict)
        assert slower.low < slower.ratio < slower.high
        assert slower.ratio == pytest.approx(factor)
        assert (same.row.variant, same.verdict) == ("naive", "same")


def test_noise_larger_than_the_change_hides_it() -> None:
    before = replace(measured("cpu", 2.0), laps=(1.0, 2.0, 3.0, 1.2, 2.8))
    (change,) = changes([before], [scaled(before, 1.1)])
    assert change.verdict == "same"


def test_slower_machine_is_no_change() -> None:
    """Times are divided by those of torch's SDPA in the same round."""
    before = [measured("cpu", 2.0), measured("sdpa", 3.0)]
    after = [scaled(one, 1.5) for one in before]
    found = {change.row.variant: change for change in changes(before, after)}
    assert found["cpu"].verdict == "same"
    assert found["cpu"].by_control
    assert found["sdpa"].verdict == "slower"
    assert not found["sdpa"].by_control


def test_other_calls_and_directions_are_not_compared() -> None:
    before = measured("cpu", 2.0)
    assert changes([before], [measured("cpu", 2.0, "fwd+bwd"), measured("sdpa", 2.0)]) == []
    other = replace(before, row=replace(before.row, N=5))
    assert changes([before], [other]) == []
    assert len(changes([before], [other, before])) == 1
