"""Suite `cpu`: measurements for the goals of benchmarks/goals/cpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.cases.attention import DTYPES, case_id
from benchmarks.cases.cpu import (
    decode_cases,
    mask_cost_cases,
    option_cost_cases,
    scaling_cases,
    sdpa_cases,
    short_cases,
)
from benchmarks.runner.caches import CacheContenders
from benchmarks.runner.ceilings import products, reading
from benchmarks.runner.checks import check_at, check_quickly
from benchmarks.runner.measure import measure
from benchmarks.runner.record import Recorder
from benchmarks.runner.without_amx import process_without_amx, rows_without_amx, saved
from transformer_kernels.backends.native import extension
from transformer_kernels.bench import Budget, Case, Direction, Row, Variant, usable_variants
from transformer_kernels.bench.contenders import CheckedCase, Contender, check
from transformer_kernels.bench.provenance import device_slug
from transformer_kernels.bench.workload import Workload

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason=extension.unavailable_reason() or ""
)

against_sdpa = pytest.mark.parametrize("checked", sdpa_cases(), ids=case_id, indirect=True)
both_directions = pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])

NAIVE_ROUNDS = 2
"""Few rounds: naive attention is up to 100 times slower than the others, and no goal uses it."""

CALL_ROUNDS = 2000
"""Maximum number of rounds for calls that take microseconds."""

CHECKED_LENGTH = 256
"""Length at which options are checked: at the timed length, plain torch takes half a minute for the
dropout bits."""


@pytest.fixture
def budget(recorder: Recorder) -> Budget:
    """Half the budget of other suites, because this one has three times as many cases."""
    return replace(recorder.budget, seconds=recorder.budget.seconds / 2)


@against_sdpa
@both_directions
def test_against_sdpa(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    checked: CheckedCase,
    direction: Direction,
) -> None:
    contenders = [
        replace(c, most_rounds=NAIVE_ROUNDS) if c.variant == "naive" else c
        for c in checked.contenders(direction)
    ]
    contenders += products(checked.case, direction)
    measure(benchmark, recorder, suite="cpu", contenders=contenders, budget=budget)


@pytest.fixture(scope="module")
def worker() -> Iterator[Executor]:
    if not device_slug().endswith("-amx"):
        pytest.skip("this CPU has no AMX: test_against_sdpa measures without it")
    try:
        with process_without_amx(torch.get_num_threads()) as started:
            yield started
    except ValueError as reason:
        pytest.skip(str(reason))


@against_sdpa
@both_directions
def test_without_amx(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    checked: CheckedCase,
    direction: Direction,
    worker: Executor,
) -> None:
    with saved(checked.expected) as expected:

        def measure_once() -> list[Row]:
            measured = worker.submit(
                rows_without_amx,
                checked.case,
                expected,
                direction=direction,
                provenance=recorder.provenance,
                budget=budget,
            )
            return measured.result()

        label = f"{case_id(checked.case)}, without AMX, {direction}"
        benchmark.pedantic(  # type: ignore[no-untyped-call]
            recorder.add_steady, args=(label, measure_once)
        )


def fused_and_naive() -> list[Variant]:
    return usable_variants(["naive", "cpu"])


@pytest.fixture(scope="module")
def masked(request: pytest.FixtureRequest) -> list[CheckedCase]:
    return [check(case, fused_and_naive()) for case in mask_cost_cases(request.param)]


@pytest.mark.parametrize("masked", DTYPES, ids=str, indirect=True)
@both_directions
def test_cost_of_masks(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    masked: list[CheckedCase],
    direction: Direction,
) -> None:
    contenders = [c for checked in masked for c in checked.contenders(direction, ["cpu"])]
    measure(benchmark, recorder, suite="cpu", contenders=contenders, budget=budget)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cost_of_options(
    benchmark: BenchmarkFixture, recorder: Recorder, budget: Budget, dtype: torch.dtype
) -> None:
    cases = [check_at(CHECKED_LENGTH, case, fused_and_naive()) for case in option_cost_cases(dtype)]
    contenders = [c for checked in cases for c in checked.contenders("fwd+bwd", ["cpu"])]
    measure(benchmark, recorder, suite="cpu", contenders=contenders, budget=budget)


@pytest.mark.parametrize("case", decode_cases(), ids=case_id)
def test_decode(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    variants: list[Variant],
    case: Case,
) -> None:
    """Compares decoding with a float32 sum over the same bytes, which is bandwidth-bound."""
    checked = check(case, variants)
    keys_and_values = torch.stack(checked.inputs[1:3])
    k, v = keys_and_values
    ready = replace(checked, inputs=checked.inputs._replace(k=k, v=v))
    fused = [variant.name for variant in variants if variant.name != "naive"]
    contenders = [*ready.contenders("fwd", fused), reading(case, keys_and_values)]
    measure(benchmark, recorder, suite="cpu", contenders=contenders, budget=budget)


@pytest.mark.parametrize("case", decode_cases(), ids=case_id)
def test_caches(
    benchmark: BenchmarkFixture, recorder: Recorder, budget: Budget, case: Case
) -> None:
    """Measures `attention_decode` with contiguous and paged caches."""
    contenders = CacheContenders(case).ours("cpu", "cpu")
    measure(benchmark, recorder, suite="cpu", contenders=contenders, budget=budget)


@pytest.mark.parametrize("checked", short_cases(), ids=case_id, indirect=True)
@both_directions
def test_short(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    checked: CheckedCase,
    direction: Direction,
) -> None:
    contenders = checked.contenders(direction)
    calls = replace(budget, most=CALL_ROUNDS)
    measure(benchmark, recorder, suite="cpu", contenders=contenders, budget=calls)


@pytest.fixture
def threads_kept() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def with_threads(contender: Contender, threads: int) -> Contender:
    """Sets the number of threads and adds an untimed run, to wake threads and warm up caches."""

    def prepare() -> Workload:
        torch.set_num_threads(threads)
        contender.prepare()()
        return contender.prepare()

    return replace(contender, prepare=prepare, threads=threads)


@pytest.mark.usefixtures("threads_kept")
@pytest.mark.parametrize("case", scaling_cases(), ids=case_id)
@both_directions
def test_scaling(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    case: Case,
    direction: Direction,
) -> None:
    (contender,) = check_quickly(case, fused_and_naive()).contenders(direction, ["cpu"])
    contenders = [with_threads(contender, threads) for threads in (1, 2)]
    measure(benchmark, recorder, suite="cpu", contenders=contenders, budget=budget)
