"""The parts of `make gpu` that need no CUDA device."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_cases import ceiling_cases
from benchmarks.runner import gpu
from benchmarks.runner.gpu import GRACE, Outcome, Stage, run_all
from benchmarks.runner.record import ROOT
from benchmarks.suites.gpu import comparisons
from tests.gpu import sanitizer_targets
from tests.kernels.cuda.hopper_cases import HOPPER_CASES
from tests.support import emulator
from tests.support.cases import CASES
from tests.support.decode_cases import DECODE_CASES
from tests.tools.bench.example import row
from transformer_kernels.bench import Case, read_rows

without_device = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests the messages without a CUDA device"
)


@pytest.mark.exhaustive
@without_device
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_without_a_device_each_command_gives_the_reason(tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = run("make", "gpu", f"PYTHON={sys.executable}", "VENV=", f"OUT={tmp_path / 'out'}")
    assert done.returncode != 0
    assert f"make gpu needs a CUDA device, and torch {torch.__version__} " in done.stderr
    assert "Traceback" not in done.stderr
    suite = run(sys.executable, "-m", "benchmarks", "gpu", "-rs", "--rows", str(tmp_path)).stdout
    assert "the suite gpu needs a CUDA device; torch finds none" in suite
    assert "not measured: flex: torch finds no CUDA device" in suite
    assert list(tmp_path.iterdir()) == []
    tests = run(sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu/test_graphs.py").stdout
    assert "tests marked gpu: deselected, no CUDA device" in tests
    assert "passed" not in tests


def test_the_time_of_the_benchmark_is_reserved() -> None:
    planned = gpu.stages(Path("out"), record=False, sanitizer="compute-sanitizer")
    assert [stage.name for stage in planned] == [
        "build", "tests", "memcheck", "racecheck", "benchmark", "training",
    ]  # fmt: skip
    assert sum(stage.least for stage in planned) <= gpu.SECONDS <= 600.0
    assert planned[-2].least >= 220.0
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
    build, tests, memcheck, racecheck, benchmark, training = (
        list(s.command(100.0)) for s in planned
    )
    assert build[1:] == ["setup.py", "--quiet", "build_ext", "--inplace"]
    assert tests[1:6] == ["-m", "pytest", "-v", "-m", "gpu"]
    assert memcheck[:3] == ["/bin/compute-sanitizer", "--tool", "memcheck"]
    assert racecheck[2] == "racecheck"
    assert benchmark[-2:] == ["--time-limit", "90"]
    assert "--rows" in benchmark
    assert "naive" not in benchmark[benchmark.index("--variants") + 1].split(",")
    assert training[1:4] == ["-m", "benchmarks", "training"]
    recorded = gpu.stages(out, record=True, built=True)
    assert list(recorded[0].command(100.0))[1:] == ["-m", "transformer_kernels", "info"]
    assert all("--record" in stage.command(100.0) for stage in recorded[-2:])
    assert {stage.log.name for stage in planned} == set(gpu.LOGS)


@pytest.mark.exhaustive
def test_a_rehearsal_runs_every_stage_to_its_end(tmp_path: Path) -> None:
    """The command of the device, on the CPU: every comparison, checked and timed once."""
    if (reason := emulator.unavailable_reason()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "benchmarks.runner.gpu", "--rehearse", "--built"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stages = (tmp_path / "summary.txt").read_text().split("\n\n")[0].splitlines()
    assert [line.split()[:2] for line in stages] == [
        [name, "passed"] for name in ("build", "tests", "benchmark", "training")
    ]
    assert " tests collected (" in stages[1]
    assert stages[2].rpartition("  ")[2].startswith(f"{len(list(comparisons()))} passed in")
    rows = read_rows(tmp_path / "gpu.csv")
    ours = [row for row in rows if row.variant in ("cuda_sm90", "triton")]
    assert {row.case for row in ours} >= {"causal", "full", "masks: none", "Llama 8B"}
    assert all(row.error < 0.03 for row in ours)


def test_a_summary_has_stages_ceilings_and_goals_or_what_is_missing() -> None:
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
    rows.append(replace(row(), suite="training", case="a model", direction="step"))
    text = "\n".join(gpu.summary(rows, outcomes))
    assert "FAILED (1)     12 s  1 failed, 2 passed" in text
    assert "ceiling: 550 TFLOP/s, bfloat16 product of 8192^3" in text
    assert "ceiling: 2147 GB/s, device copy" in text
    assert "forward: flex / triton, mean" in text
    assert "2.00 of 1" in text
    assert "a model, float16, B 1, H 8/8, 4 x 4, D 64, step" in text
    assert "nothing was measured" in "\n".join(gpu.summary([], []))


def test_sanitizer_targets_are_names_of_cases() -> None:
    assert set(sanitizer_targets.ATTENTION_TARGETS) <= {case.name for case in CASES}
    assert set(sanitizer_targets.HOPPER_TARGETS) <= {case.name for case in HOPPER_CASES}
    assert set(sanitizer_targets.DECODE_TARGETS) <= {case.name for case in DECODE_CASES}


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


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE", 5.0)


def stage(name: str, code: str, folder: Path, *, least: float = 0.0) -> Stage:
    return Stage(
        name=name,
        command=lambda seconds: [sys.executable, "-c", code, f"{seconds:.0f}"],
        log=folder / "all.log",
        least=least,
        environment={"STAGE": name},
    )


def test_every_stage_runs_and_reports_its_outcome(tmp_path: Path) -> None:
    planned = [
        stage("good", "import os; print('fine', os.environ['STAGE'])", tmp_path),
        stage("bad", "import sys; print('broken'); sys.exit(3)", tmp_path),
        stage("last", "print('= still here =')", tmp_path),
    ]
    outcomes = list(run_all(planned, 60.0))
    assert [(o.name, o.code, o.passed, o.last_line) for o in outcomes] == [
        ("good", 0, True, "fine good"),
        ("bad", 3, False, "broken"),
        ("last", 0, True, "still here"),
    ]
    assert "FAILED (3)" in str(outcomes[1])
    assert (tmp_path / "all.log").read_text().split("\n")[:2] == ["fine good", "broken"]


def test_later_stages_have_their_reserved_time_plus_what_is_left(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1])"
    planned = [stage(name, code, tmp_path, least=20.0) for name in "abc"]
    limits = [float(outcome.last_line) for outcome in run_all(planned, 100.0)]
    assert limits == pytest.approx([55.0, 75.0, 95.0], abs=5.0)


WAITS = """
import time
try:
    print("started", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("wrote what it had")
"""
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child])
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.exhaustive
def test_a_stage_out_of_time_is_interrupted_and_can_write_its_results(tmp_path: Path) -> None:
    (outcome,) = run_all([stage("slow", WAITS, tmp_path)], 10.0)
    assert outcome.code is None
    assert not outcome.passed
    assert outcome.last_line == "wrote what it had"
    assert "OUT OF TIME" in str(outcome)


@pytest.mark.exhaustive
def test_a_stage_that_ignores_the_interrupt_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    start = time.monotonic()
    (outcome,) = run_all([stage("stubborn", STUBBORN, tmp_path)], 3.0)
    assert outcome.code is None
    assert time.monotonic() - start < 10.0
