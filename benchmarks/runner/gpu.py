"""Everything that needs a CUDA device, in ten minutes at most: `make gpu`.

It builds the extension, runs the tests marked `gpu`, watches a few small calls by compute-sanitizer
and measures the suite `gpu`. Each has a time limit, and the measuring is never without its own;
logs, rows and summary.txt go to one folder. The exit status is 1 unless all of them pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.goals.check import as_columns, judge, provenance
from benchmarks.runner.record import RECORDED
from benchmarks.runner.stages import Outcome, Stage, run_all
from transformer_kernels.bench import Provenance, Row, device_slug, read_rows

SECONDS = 570.0
"""For all: ten minutes, less what make and Python take to start and a machine may be slower"""

SANITIZERS = {"memcheck": 45.0, "racecheck": 35.0}
"""Each with the seconds that are kept for it"""
GPU_TESTS = ("tests/gpu", "tests/csrc/cuda/test_ptx.py")
"""The files with tests that are marked `gpu`"""
LAST_CASE = 10.0
"""Seconds that the benchmark may go on with the case that it has begun"""
TEST_SECONDS = 60
"""For a test; what takes longer hangs"""
LOGS = ("build.log", "tests.log", "sanitizer.log", "benchmark.log")


def stages(out: Path, *, record: bool, sanitizer: str | None) -> list[Stage]:
    """In order. `record` adds the rows to the recorded ones; else they replace those in `out`."""
    python = sys.executable
    watched = [python, "-m", "tests.gpu.sanitizer_targets"]
    destination = ["--record"] if record else ["--rows", str(out)]
    found = (
        [] if sanitizer is None else [_watch(sanitizer, tool, watched, out) for tool in SANITIZERS]
    )
    return [
        Stage(
            name="build",
            command=lambda _: [python, "setup.py", "--quiet", "build_ext", "--inplace"],
            log=out / "build.log",
            least=60.0,
        ),
        Stage(
            name="tests",
            command=lambda _: [
                *(python, "-m", "pytest", "-v", "-m", "gpu", *GPU_TESTS, *_in_parallel()),
                *_with_a_time_limit_each(),
                "--continue-on-collection-errors",  # a module without the extension, say
            ],
            log=out / "tests.log",
            least=140.0,
            environment={
                "TRANSFORMER_KERNELS_EMULATOR": "0",  # here the kernels themselves run
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                # cuBLAS repeats its bits only with this, and torch asks for it
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            },
        ),
        *found,
        Stage(
            name="benchmark",
            command=lambda seconds: [
                *(python, "-m", "pytest", "benchmarks/test_gpu.py", *destination),
                *("-W", "default"),  # what torch warns of must not end a measurement
                *("--time-limit", f"{max(0.0, seconds - LAST_CASE):.0f}"),
            ],
            log=out / "benchmark.log",
            least=250.0,
        ),
    ]  # fmt: skip


def _in_parallel() -> list[str]:
    """Compiling the kernels is most of the tests' time; pytest-xdist is used where there is one."""
    if importlib.util.find_spec("xdist") is None:
        return []
    workers = str(max(1, (os.cpu_count() or 1) - 2))
    # In the order of tests/gpu/conftest.py, a few at a time.
    return ["-n", workers, "--dist", "load", "--maxschedchunk", "2"]


def _with_a_time_limit_each() -> list[str]:
    """A kernel that hangs holds its process, which then has to end; pytest-timeout does that."""
    if importlib.util.find_spec("pytest_timeout") is None:
        return []
    return ["--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]


def _watch(sanitizer: str, tool: str, watched: Sequence[str], out: Path) -> Stage:
    # torch asks the driver for things that it may lack; such an answer is no error of a kernel.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return Stage(
        name=tool,
        command=lambda _: [sanitizer, "--tool", tool, *options, "--error-exitcode", "9", *watched],
        log=out / "sanitizer.log",
        least=SANITIZERS[tool],
        # An allocation of its own for every tensor, so that accesses behind its end are seen.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def find_sanitizer() -> str | None:
    """On PATH, or where a CUDA toolkit puts it."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=home / "bin")


def impossible_reason() -> str | None:
    """None where torch finds a CUDA device."""
    if torch.cuda.is_available():
        return None
    built = "is built without CUDA" if torch.version.cuda is None else "finds none"
    return f"make gpu needs a CUDA device, and torch {torch.__version__} {built}"


def summary(rows: Sequence[Row], outcomes: Iterable[Outcome], sanitizer: str | None) -> list[str]:
    lines = [str(outcome) for outcome in outcomes]
    if sanitizer is None:
        lines.append(
            "sanitizer  NOT RUN      compute-sanitizer is neither on PATH nor in CUDA_HOME"
        )
    if not rows:
        return [*lines, "", "nothing was measured"]
    return [*lines, "", provenance(rows), *_ceilings(rows), "", *as_columns(judge(rows))]


def _ceilings(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if row.variant == "matmul":
            yield f"ceiling: {row.tflops:.0f} TFLOP/s, {row.dtype} product of {row.M}^3"
        if row.variant == "copy":
            yield f"ceiling: {row.gbytes_s:.0f} GB/s, device copy, bytes read and written"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runner.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: benchmarks/results/<device>"
    )
    given: Path | None = parser.parse_args().out
    reason = impossible_reason()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    out = (given or RECORDED / device_slug(torch.device("cuda"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in LOGS:
        (out / name).unlink(missing_ok=True)
    if given is not None:
        (out / "gpu.csv").unlink(missing_ok=True)
    sanitizer = find_sanitizer()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the stage that runs ends too
    started = Provenance.now().date
    outcomes = []
    for outcome in run_all(stages(out, record=given is None, sanitizer=sanitizer), SECONDS):
        if not outcome.passed:
            print(*outcome.tail, sep="\n")
        print(outcome, flush=True)
        outcomes.append(outcome)
    recorded = read_rows(out / "gpu.csv") if (out / "gpu.csv").exists() else []
    rows = [row for row in recorded if row.date >= started]
    lines = summary(rows, outcomes, sanitizer)
    (out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, "", f"logs and rows: {out}", sep="\n")
    return 0 if rows and all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
