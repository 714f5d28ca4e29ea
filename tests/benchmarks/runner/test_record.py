from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.runner.record import Recorder, as_text, latest
from tests.bench.example import PROVENANCE, row
from transformer_kernels.bench import Budget, read_rows


@pytest.mark.parametrize(("keep", "after_two_runs"), [(True, 2), (False, 1)])
def test_rows_are_appended_or_replaced_in_one_file_per_suite(
    keep: bool, after_two_runs: int, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    gpu = replace(row(), suite="gpu", device="nvidia-h200")
    names = ["xeon-amx/attention.csv", "xeon-amx/masks.csv", "nvidia-h200/gpu.csv"]
    paths = [folder / (name if keep else Path(name).name) for name in names]
    for _ in range(2):
        recorder = Recorder(PROVENANCE, Budget(1.0), folder=folder, keep=keep)
        recorder.add([row(), replace(row(), suite="masks"), gpu])
        assert recorder.paths == paths
    for path in paths:
        assert len(read_rows(path)) == after_two_runs


@pytest.mark.parametrize("keep", [True, False])
def test_rows_are_written_immediately(keep: bool, tmp_path: Path) -> None:
    recorder = Recorder(PROVENANCE, Budget(1.0), folder=tmp_path, keep=keep)
    for count in range(1, 4):
        recorder.add([replace(row(), N=count)])
        (path,) = recorder.paths
        assert [one.N for one in read_rows(path)] == list(range(1, count + 1))


def test_latest_keeps_the_last_row_of_each_case_and_variant() -> None:
    others = [replace(row(), variant="naive"), replace(row(), N=8), replace(row(), threads=7)]
    old = [row(), *others]
    new = replace(row(), date="2026-02-01T00:00:00Z")
    for order in ([*old, new], [new, *old]):
        assert sorted(map(repr, latest(order))) == sorted(map(repr, [new, *others]))


def test_text_has_a_title_per_case_and_a_line_per_row() -> None:
    lines = as_text([row(), replace(row(), variant="naive"), replace(row(), direction="bwd")])
    assert [line for line in lines if line.endswith(("fwd", "bwd"))] == [
        "causal, float16, 4 x 4, D 64, fwd",
        "causal, float16, 4 x 4, D 64, bwd",
    ]
    assert sum("2.000 ms  (1.500 .. 2.500)" in line for line in lines) == 3
