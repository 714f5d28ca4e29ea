"""All checks that need a CUDA device, in at most ten minutes: `make gpu`.

Stages: build of the extension, tests marked `gpu`, compute-sanitizer on a few small calls if asked
for, the benchmark suite `gpu`, and training steps of GPT-2. Each stage has a time limit, and the
time of the benchmarks is reserved. Logs, rows and summary.txt are written to one folder. The exit
status is 1 unless all stages pass.

A rehearsal runs the same stages on the CPU (benchmarks/runner/target.py); the tests are only
collected.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.goals.check import as_columns, check_goals, provenance
from benchmarks.runner.record import RECORDED, ROOT, UNRECORDED, as_text
from benchmarks.runner.target import REHEARSAL
from transformer_kernels.bench import VARIANTS, Provenance, Row, device_slug, read_rows

SECONDS = 570.0
"""Time for all stages: ten minutes less the start of make and Python, and a margin."""
HOUR = 3600.0
"""Likewise, of a rehearsal."""

SANITIZERS = {"memcheck": 45.0, "racecheck": 35.0}
"""Tools of compute-sanitizer, with the seconds reserved for each."""
GPU_TESTS = (
    "tests/gpu",
    "tests/contract",
    "tests/properties",
    "tests/kernels/cuda/test_ptx.py",
)
"""Files and folders with tests marked `gpu`."""
LAST_CASE = 10.0
"""Seconds that the benchmark may take to finish its current case after the time limit."""
TEST_SECONDS = 60
"""Time limit of one test; a longer one is considered hanging."""
LOGS = ("build.log", "tests.log", "sanitizer.log", "benchmark.log", "training.log")
ROWS = ("gpu.csv", "training.csv")
TIMED = [name for name in VARIANTS if name not in ("naive", "sdpa", "sdpa_efficient")]
"""Variants of the suite `gpu`: neither the slowest two nor "sdpa", which runs one of the others."""
TOLERANCE = "20"
"""Percent; a GPU at its limit of power is never steady, and repetitions cost its time."""

GRACE = 20.0
"""Seconds between SIGINT and SIGKILL for a stage that is out of time. pytest-xdist needs 10 to give
up a hanging worker and report the results of the others."""

TAIL = 30
"""Number of last log lines that an outcome keeps."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command with a log file and reserved time."""

    name: str
    command: Callable[[float], Sequence[str]]
    """maps the time limit in seconds to a command line"""
    log: Path
    """appended to, so that stages can share it"""
    least: float
    """seconds reserved for this stage, regardless of the duration of earlier stages"""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of a stage."""

    name: str
    code: int | None
    """exit status; None if the stage ran out of time"""
    seconds: float
    tail: tuple[str, ...]
    """last non-empty lines of the log"""

    @property
    def last_line(self) -> str:
        return self.tail[-1].strip("= ") if self.tail else ""

    @property
    def passed(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        status = {0: "passed", None: "OUT OF TIME"}.get(self.code, f"FAILED ({self.code})")
        return f"{self.name:10} {status:12} {self.seconds:4.0f} s  {self.last_line}"


def run_all(stages: Sequence[Stage], seconds: float) -> Iterator[Outcome]:
    """Runs every stage, even after failures, and yields its outcome.

    The time limit of a stage is the rest of `seconds`, less the time reserved for later stages.
    """
    end = time.monotonic() + seconds
    for i, stage in enumerate(stages):
        reserved = sum(later.least for later in stages[i + 1 :])
        yield run(stage, end - time.monotonic() - reserved)


def run(stage: Stage, seconds: float) -> Outcome:
    """Runs one stage. At the time limit it gets SIGINT, to write its results, then SIGKILL."""
    limit = max(0.0, seconds - GRACE)
    start = time.monotonic()
    with stage.log.open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            list(stage.command(limit)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment},
            start_new_session=True,  # so that its child processes can be killed with it
            # A background process inherits an ignored SIGINT.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        code: int | None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = stage.log.read_text(encoding="utf-8", errors="replace").split("\n")
    tail = [line for line in lines if line.strip()][-TAIL:]
    return Outcome(stage.name, code, time.monotonic() - start, tuple(tail))


def stages(
    out: Path, *, record: bool, sanitizer: str | None = None, built: bool = False
) -> list[Stage]:
    """Returns the stages in order.

    Args:
        out: folder of logs and rows.
        record: append rows to the recorded ones; otherwise they replace those in `out`.
        sanitizer: path of compute-sanitizer; None skips its stages.
        built: the extension is there: the first stage says what it was built for.
    """
    python = sys.executable
    build = ["-m", "transformer_kernels", "info"]
    if not built:
        build = ["setup.py", "--quiet", "build_ext", "--inplace"]
    targets = [python, "-m", "tests.gpu.sanitizer_targets"]
    destination = ["--record"] if record else ["--rows", str(out)]
    destination += ["--tolerance", TOLERANCE, "-W", "default"]  # torch's warnings are no errors
    sanitizer_stages = (
        [] if sanitizer is None else [_sanitize(sanitizer, t, targets, out) for t in SANITIZERS]
    )
    return [
        Stage(
            name="build",
            command=lambda _: [python, *build],
            log=out / "build.log",
            least=10.0 if built else 60.0,
        ),
        Stage(
            name="tests",
            command=lambda _: [
                *(python, "-m", "pytest", "-v", "-m", "gpu", *GPU_TESTS, *_in_parallel()),
                *_per_test_time_limit(),
                "--continue-on-collection-errors",  # such as a failed import of the extension
            ],
            log=out / "tests.log",
            least=140.0,
            environment={
                "TRANSFORMER_KERNELS_EMULATOR": "0",  # run the kernels on the GPU
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                # torch requires this for deterministic cuBLAS
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            },
        ),
        *sanitizer_stages,
        Stage(
            name="benchmark",
            command=lambda seconds: [
                *(python, "-m", "benchmarks", "gpu", *destination, "--variants", ",".join(TIMED)),
                *("--time-limit", f"{max(0.0, seconds - LAST_CASE):.0f}"),
            ],
            log=out / "benchmark.log",
            least=220.0,
        ),
        Stage(
            name="training",
            command=lambda _: [
                *(python, "-m", "benchmarks", "training", *destination),
                *("-k", "gpt2_gpt2", "--variants", "sdpa,cuda_sm90,cuda_sm80,cpu"),
            ],
            log=out / "training.log",
            least=40.0,
        ),
    ]


def rehearsed(stage: Stage) -> Stage:
    """Returns the stage on the CPU. Tests need the device: they are collected, not run."""
    more = ["--collect-only", "-q"] if stage.name == "tests" else []
    return replace(
        stage,
        command=lambda seconds: [*stage.command(seconds), *more],
        environment={**stage.environment, **REHEARSAL},
    )


def _in_parallel() -> list[str]:
    """Options of pytest-xdist, if installed: compilation dominates the time of the tests."""
    if importlib.util.find_spec("xdist") is None:
        return []
    workers = str(max(1, (os.cpu_count() or 1) - 2))
    # Small chunks keep the order set by tests/gpu/conftest.py.
    return ["-n", workers, "--dist", "load", "--maxschedchunk", "2"]


def _per_test_time_limit() -> list[str]:
    """Options of pytest-timeout, if installed: it ends the process of a hanging kernel."""
    if importlib.util.find_spec("pytest_timeout") is None:
        return []
    return ["--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]


def _sanitize(sanitizer: str, tool: str, targets: Sequence[str], out: Path) -> Stage:
    # torch probes optional driver functions, whose failure is not an error of a kernel.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return Stage(
        name=tool,
        command=lambda _: [
            *(sanitizer, "--tool", tool, *options, "--error-exitcode", "9"),
            *(*targets, tool),
        ],
        log=out / "sanitizer.log",
        least=SANITIZERS[tool],
        # One allocation per tensor, so that accesses beyond its end are detected.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def find_sanitizer() -> str | None:
    """Returns the path of compute-sanitizer on PATH or in the CUDA toolkit, or None."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=home / "bin")


def impossible_reason(command: str = "make gpu") -> str | None:
    """Returns the reason why the command cannot run, or None if torch finds a CUDA device."""
    if torch.cuda.is_available():
        return None
    built = "is built without CUDA" if torch.version.cuda is None else "finds none"
    needed = f"{command} needs a CUDA device, and torch {torch.__version__} {built}"
    return f"{needed}; WITH=rehearse runs it on the CPU"


def summary(rows: Sequence[Row], outcomes: Iterable[Outcome]) -> list[str]:
    """Returns the lines of summary.txt: outcomes of the stages, ceilings, goals and steps."""
    lines = [str(outcome) for outcome in outcomes]
    if not rows:
        return [*lines, "", "nothing was measured"]
    steps = as_text(row for row in rows if row.suite == "training")
    lines += ["", provenance(rows), *_ceilings(rows), "", *as_columns(check_goals(rows))]
    return [*lines, *steps]


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
    parser.add_argument("--built", action="store_true", help="use the extension as it is")
    parser.add_argument("--sanitizer", action="store_true", help="run compute-sanitizer, too")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU; needs no device")
    args = parser.parse_args()
    reason = None if args.rehearse else impossible_reason()
    sanitizer = find_sanitizer() if args.sanitizer else None
    if args.sanitizer and sanitizer is None:
        reason = "compute-sanitizer is neither on PATH nor in CUDA_HOME"
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    record = args.out is None and not args.rehearse
    default = RECORDED / device_slug(torch.device("cuda")) if record else UNRECORDED
    out: Path = (args.out or default).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in (*LOGS, *(() if record else ROWS)):
        (out / name).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also ends the running stage
    started = Provenance.now().date
    planned = stages(out, record=record, sanitizer=sanitizer, built=args.built)
    if args.rehearse:
        planned = list(map(rehearsed, planned))
    outcomes = []
    for outcome in run_all(planned, HOUR if args.rehearse else SECONDS):
        if not outcome.passed:
            print(*outcome.tail, sep="\n")
        print(outcome, flush=True)
        outcomes.append(outcome)
    found = [read_rows(out / name) for name in ROWS if (out / name).exists()]
    rows = [row for of_suite in found for row in of_suite if row.date >= started]
    lines = summary(rows, outcomes)
    (out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, "", f"logs and rows: {out}", sep="\n")
    return 0 if rows and all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
