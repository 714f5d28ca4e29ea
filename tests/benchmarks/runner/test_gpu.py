"""The parts of `make gpu` that need no CUDA device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cases.gpu import ceiling_cases
from benchmarks.runner import gpu
from benchmarks.runner.record import ROOT
from benchmarks.runner.stages import GRACE, Outcome
from tests.bench.example import row
from tests.csrc.cuda.hopper_cases import HOPPER_CASES
from tests.gpu import sanitizer_targets
from tests.support.cases import CASES
from tests.support.decode_cases import DECODE_CASES
from transformer_kernels.bench import Case

without_device = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests the messages without a CUDA device"
)


@pytest.mark.exhaustive
@without_device
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_gpu_fails_without_a_device_and_gives_the_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}", "VENV=", f"OUT={tmp_path / 'out'}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"make gpu needs a CUDA device, and torch {torch.__version__} " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
@without_device
def test_the_suite_is_skipped_without_a_device_and_gives_the_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks/test_gpu.py", "--rows", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "the suite gpu needs a CUDA device; torch finds none" in done.stdout
    assert "not measured: flex: torch finds no CUDA device" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
@without_device
def test_tests_marked_gpu_are_deselected_without_a_device_with_the_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu/test_graphs.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "tests marked gpu: deselected, no CUDA device" in done.stdout
    assert "passed" not in done.stdout


def test_the_time_of_the_benchmark_is_reserved() -> None:
    planned = gpu.stages(Path("out"), record=False, sanitizer="compute-sanitizer")
    assert [stage.name for stage in planned] == [
        "build", "tests", "memcheck", "racecheck", "benchmark",
    ]  # fmt: skip
    assert sum(stage.least for stage in planned) <= gpu.SECONDS <= 600.0
    assert planned[-1].least >= 250.0
    left_to_build = gpu.SECONDS - sum(stage.least for stage in planned[1:]) - GRACE
    assert left_to_build >= 70.0


def test_all_tests_marked_gpu_are_run() -> None:
    """The stage names files, because collecting all tests takes one of the ten minutes."""
    tests = ROOT / "tests"
    marked = {path for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text()}
    named = {path for one in gpu.GPU_TESTS for path in (ROOT / one, *(ROOT / one).rglob("*.py"))}
    assert marked - {Path(__file__)} <= named


def test_stages_have_the_expected_commands() -> None:
    out = Path("out")
    planned = gpu.stages(out, record=False, sanitizer="/bin/compute-sanitizer")
    build, tests, memcheck, racecheck, benchmark = (list(s.command(100.0)) for s in planned)
    assert build[1:] == ["setup.py", "--quiet", "build_ext", "--inplace"]
    assert tests[1:6] == ["-m", "pytest", "-v", "-m", "gpu"]
    assert memcheck[:3] == ["/bin/compute-sanitizer", "--tool", "memcheck"]
    assert racecheck[2] == "racecheck"
    assert benchmark[-2:] == ["--time-limit", "90"]
    assert "--rows" in benchmark
    recorded = gpu.stages(out, record=True, sanitizer=None)
    assert "--record" in recorded[-1].command(100.0)
    assert len({stage.log for stage in planned}) + len(["gpu.csv", "summary.txt"]) <= 6


def test_a_summary_has_stages_ceilings_and_goals() -> None:
    product, copy = ceiling_cases()
    rows = [
        replace(row(case=case), suite="gpu", variant=variant, device="nvidia-h200")
        for case, variant in ((product, "matmul"), (copy, "copy"))
    ]
    full = Case(name="full", M=512, N=512, dtype=torch.bfloat16)
    rows += [
        replace(row(case=full), suite="gpu", variant=variant, median_ms=ms)
        for variant, ms in (("flex", 2.0), ("triton", 1.0))
    ]
    outcomes = [Outcome("tests", 1, 12.0, ("= 1 failed, 2 passed =",))]
    text = "\n".join(gpu.summary(rows, outcomes, "compute-sanitizer"))
    assert "FAILED (1)     12 s  1 failed, 2 passed" in text
    assert "ceiling: 550 TFLOP/s, bfloat16 product of 8192^3" in text
    assert "ceiling: 2147 GB/s, device copy" in text
    assert "forward: flex / triton, mean" in text
    assert "2.00 of 1" in text
    assert "NOT RUN" not in text


def test_sanitizer_targets_are_names_of_cases() -> None:
    assert set(sanitizer_targets.ATTENTION_TARGETS) <= {case.name for case in CASES}
    assert set(sanitizer_targets.HOPPER_TARGETS) <= {case.name for case in HOPPER_CASES}
    assert set(sanitizer_targets.DECODE_TARGETS) <= {case.name for case in DECODE_CASES}


def test_a_summary_reports_missing_parts() -> None:
    text = "\n".join(gpu.summary([], [], None))
    assert "compute-sanitizer is neither on PATH nor in CUDA_HOME" in text
    assert "nothing was measured" in text


def test_the_sanitizer_is_found_in_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gpu.find_sanitizer() is None
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert gpu.find_sanitizer() == str(tool)
