"""What is measured of the machine: limits, disturbances, peak memory and its name."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from building.extension import ROOT
from tests.tools.bench.example import row
from transformer_kernels.bench import Case, memory
from transformer_kernels.bench.limits import Limits, measure_limits, memory_rate, product_rate
from transformer_kernels.bench.memory import memory_can_be_measured, peak_extra_bytes
from transformer_kernels.bench.provenance import ROWS, Provenance, commit_of, device_slug, slug_of
from transformer_kernels.bench.steadiness import Probe, Speed, Watch, measure_steadily
from transformer_kernels.bench.workload import Workload

LIMITS = Limits(tflops=2.0, gbytes_s=100.0)
CALL = replace(
    row(), B=1, H_q=4, H_kv=4, M=64, N=64, D=32, D_v=32, visible=1.0, median_ms=10.0,
    tflops=1.0, gbytes_s=20.0,
)  # fmt: skip


def test_larger_of_both_limits_counts() -> None:
    assert LIMITS.share(CALL) == pytest.approx(0.5)
    assert LIMITS.binding(CALL) == "products"
    reading = replace(CALL, gbytes_s=90.0)
    assert LIMITS.share(reading) == pytest.approx(0.9)
    assert LIMITS.binding(reading) == "memory"


def test_keys_that_no_query_sees_are_not_read() -> None:
    """One query that sees a quarter of the keys: q and o are 1 of 65 rows each."""
    step = replace(CALL, M=1, visible=0.25, tflops=0.0, gbytes_s=65.0)
    assert LIMITS.share(step) == pytest.approx(0.65 * (1 + 0.25 * 64) / 65)


def test_rates_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than a loop in Python, smaller than any CPU's."""
    monkeypatch.setattr("transformer_kernels.bench.limits.SIDES", {"cpu": 64})
    monkeypatch.setattr("transformer_kernels.bench.limits.BYTES", {"cpu": 2**16})
    for dtype in (torch.float32, torch.bfloat16):
        limits = measure_limits(dtype, torch.device("cpu"))
        assert 1e-6 < limits.tflops < 1e3
        assert 1e-2 < limits.gbytes_s < 1e5


def test_fastest_lap_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        laps = iter([3.0, 2.0, 4.0, 2.5, 5.0, 1.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0])

        def lap(self, workload: object) -> object:
            seconds = next(self.laps)
            return lambda: seconds

        def wait(self) -> None:
            pass

    clock = Clock()
    monkeypatch.setattr("transformer_kernels.bench.limits.clock_for", lambda _: clock)
    monkeypatch.setattr("transformer_kernels.bench.limits.SIDES", {"cpu": 10})
    monkeypatch.setattr("transformer_kernels.bench.limits.BYTES", {"cpu": 80})
    cpu = torch.device("cpu")
    assert product_rate(torch.float32, cpu) == 2 * 10**3 / 2.0
    assert memory_rate(cpu) == max(80 / 1.0, 2 * 80 / 4.0)


CALM, SLOW = Speed(1.0, 1.0), Speed(1.0, 1.2)


def probes(speeds: Iterable[Speed]) -> Watch:
    """A watch that sees these, then CALM."""
    left = iter(speeds)
    return Watch(lambda: next(left, CALM))


def log_of(speeds: Iterable[Speed], tries: int = 3) -> tuple[list[str], list[str], list[str]]:
    """Names of the measured items in order, of those with a result, of the disturbed ones."""
    log: list[str] = []

    def measure(name: str) -> int:
        log.append(name)
        return len(log)

    steady = measure_steadily("abc", measure, probes(speeds), tries=tries)
    for name, result in steady.results:
        assert log[result - 1] == name, "the last measurement counts"
        assert name not in log[result:]
    return log, [name for name, _ in steady.results], [one.item for one in steady.disturbed]


def test_disturbed_items_are_measured_again_after_the_others() -> None:
    """A slow probe disturbs the items before and after it."""
    assert log_of([]) == (["a", "b", "c"], ["a", "b", "c"], [])
    for at, again in enumerate((["a"], ["a", "b"], ["b", "c"], ["c"])):
        speeds = [SLOW if n == at else CALM for n in range(4)]
        assert log_of(speeds) == (["a", "b", "c", *again], ["a", "b", "c"], [])


def test_items_that_are_disturbed_in_every_try_are_named() -> None:
    speeds = [CALM, CALM, CALM, SLOW, CALM, SLOW, CALM, SLOW]
    assert log_of(speeds) == (["a", "b", "c", "c", "c"], ["a", "b"], ["c"])
    steady = measure_steadily("c", len, probes([CALM, CALM, SLOW]), tries=1, tolerance=0.1)
    assert steady.disturbed == []
    steady = measure_steadily("c", len, probes([CALM, SLOW]), tries=1, tolerance=0.1)
    assert [(one.item, round(one.slower, 3)) for one in steady.disturbed] == [("c", 0.2)]
    assert measure_steadily("c", len, probes([CALM, SLOW]), tolerance=0.25).disturbed == []


def test_machine_that_was_slow_from_the_start_is_noticed_later() -> None:
    """Items that were accepted are measured again when the machine turns out to be faster."""
    speeds = [SLOW, SLOW, SLOW, CALM, CALM]
    log, kept, disturbed = log_of(speeds)
    assert log[:3] == ["a", "b", "c"]
    assert {*log[3:]} == {"a", "b", "c"}
    assert (sorted(kept), disturbed) == (["a", "b", "c"], [])


def test_single_fast_probe_does_not_count() -> None:
    """A moment of turbo, in one of five probes or more."""
    speeds = [Speed(0.5, 0.5), *[CALM] * 8]
    steady = measure_steadily(range(8), float, probes(speeds))
    assert len(steady.results) == 8


def test_speed_of_earlier_measurements_counts() -> None:
    """A machine that is slow before, during and after a measurement."""
    watch = probes([CALM, CALM, SLOW, SLOW])
    assert measure_steadily("a", len, watch).disturbed == []
    assert len(measure_steadily("b", len, watch, tries=1).disturbed) == 1


def test_slower_part_counts() -> None:
    watch = probes([])
    watch.probe()
    assert watch.slowdown(Speed(1.1, 1.0)) == pytest.approx(0.1)
    assert watch.slowdown(CALM, Speed(0.9, 1.3)) == pytest.approx(0.3)


def test_probe_measures_a_product_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_kernels.bench.steadiness.SIDES", {"cpu": 32})
    monkeypatch.setattr("transformer_kernels.bench.steadiness.BYTES", {"cpu": 2**12})
    speed = Probe(torch.device("cpu"))()
    assert 0.0 < speed.product < 1.0
    assert 0.0 < speed.copy < 1.0


MIB = 2**20
NOISE = 6 * MIB

linux = pytest.mark.skipif(
    not memory_can_be_measured(), reason="/proc/self/clear_refs cannot be written here"
)


def peak_of(workload: Workload) -> int:
    peak = peak_extra_bytes(lambda: workload)
    assert peak is not None
    return peak


def free_at_once() -> None:
    torch.ones(64 * MIB, dtype=torch.uint8).clone()


def free_in_between() -> None:
    for _ in range(4):
        torch.ones(48 * MIB, dtype=torch.uint8)


def outside_torch() -> None:
    with mmap.mmap(-1, 64 * MIB) as block:
        ctypes.memset((ctypes.c_char * len(block)).from_buffer(block), 1, len(block))


PEAKS = """
from tests.tools.bench.test_machine import free_at_once, free_in_between, outside_torch, peak_of
print(*map(peak_of, (free_at_once, free_in_between, outside_torch)))
"""


@pytest.mark.quick
@linux
def test_every_allocation_counts_until_it_is_freed() -> None:
    """In a new process, whose heap has no free blocks of such sizes, which the C library keeps."""
    command = [sys.executable, "-c", PEAKS]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for peak, expected in zip(map(int, found.split()), (128, 48, 64), strict=True):
        assert (expected - 6) * MIB < peak < (expected + 6) * MIB


@linux
def test_inputs_and_earlier_peaks_do_not_count() -> None:
    x = torch.ones(64 * MIB, dtype=torch.uint8)
    assert peak_of(x.max) < NOISE
    torch.ones(256 * MIB, dtype=torch.uint8)
    assert peak_of(lambda: torch.ones(32 * MIB, dtype=torch.uint8)) < 32 * MIB + NOISE


def test_on_a_device_the_peak_of_the_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the memory after the set-up; the warm-up run is not measured."""
    allocated, peak = 100, 0
    log: list[str] = []

    def prepare() -> Workload:
        nonlocal allocated
        allocated += 1000  # memory of the set-up
        log.append("set up")

        def work() -> None:
            nonlocal peak
            peak = max(peak, allocated + 64)
            log.append("work")

        return work

    def reset(_device: torch.device) -> None:
        nonlocal peak
        peak = allocated
        log.append("reset")

    monkeypatch.setattr("torch.cuda.synchronize", lambda _: log.append("wait"))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: allocated)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: peak)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset)
    assert peak_extra_bytes(prepare, torch.device("cuda")) == 64
    assert log == ["set up", "work", "set up", "wait", "reset", "work", "wait"]


def test_naive_attention_larger_than_the_free_memory_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for available, needed in (
        (5 * 2**30, "naive attention needs 5.6 GiB"),
        (6 * 2**30, ""),
        (None, ""),
    ):
        monkeypatch.setattr(memory, "available_bytes", lambda available=available: available)
        reason = memory.too_large_reason(Case(name="causal", M=6144, N=6144))
        assert (reason or "").startswith(needed)
        assert (reason is None) == (needed == "")


@pytest.mark.parametrize(
    ("model", "flags", "machine", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C", "avx2 avx512f amx_bf16", "x86_64", "xeon-amx"),
        ("AMD EPYC 7B13", "sse2 avx2", "x86_64", "epyc-avx2"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "avx2 avx512f", "x86_64", "ryzen-avx512"),
        ("Common KVM processor", "sse2", "x86_64", "x86-64"),
        ("", "", "aarch64", "aarch64"),
    ],
)
def test_a_slug_has_the_family_and_the_widest_instructions(
    model: str, flags: str, machine: str, slug: str
) -> None:
    cpuinfo = f"processor\t: 0\nmodel name\t: {model}\nflags\t\t: fpu {flags}\n"
    assert slug_of(cpuinfo, machine) == slug


def test_the_slug_of_a_gpu_is_its_device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "AMD Instinct MI300X (rev. 1)"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    device, now = torch.device("cuda"), Provenance.now()
    assert device_slug(device) == "amd-instinct-mi300x-rev-1"
    assert now.on(device) == replace(now, device="amd-instinct-mi300x-rev-1")
    assert now.on(torch.device("cpu")) == now


def test_changed_files_mark_a_commit_but_recorded_rows_do_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    source, rows = tmp_path / "source.py", tmp_path / ROWS / "device" / "cpu.csv"
    rows.parent.mkdir(parents=True)
    source.touch()
    rows.touch()
    assert commit_of(tmp_path) == ""
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    commit = commit_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    rows.write_text("a row")
    assert commit_of(tmp_path) == commit
    source.write_text("a change")
    assert commit_of(tmp_path) == commit + "+"


def test_now_describes_this_process() -> None:
    now = Provenance.now()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", now.date)
    assert now.threads == torch.get_num_threads()
    assert now.torch == torch.__version__
    assert re.fullmatch(r"[a-z0-9-]+", now.device)
