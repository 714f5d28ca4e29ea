"""Suite `gpu`: torch's kernels and ours on a CUDA device, within a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.cases.attention import case_id
from benchmarks.cases.gpu import (
    ceiling_cases,
    decode_cases,
    grid_cases,
    linear_cases,
    masked_cases,
    name_of,
)
from benchmarks.runner.caches import CacheContenders
from benchmarks.runner.compile_ahead import COMPILED, compile_ahead
from benchmarks.runner.gpu_linear import LinearContenders, fla, ours
from benchmarks.runner.measure import measure
from benchmarks.runner.record import Recorder
from benchmarks.runner.smoke_test import failure_reasons
from transformer_kernels.backends import CudaBackend
from transformer_kernels.bench import VARIANTS, Budget, Case, Direction, Variant, usable_variants
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.trial import Trial, try_out
from transformer_kernels.bench.workload import Workload

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the suite gpu needs a CUDA device; torch finds none"
)

DEVICE = torch.device("cuda")
NAIVE_ROUNDS = 3
FLEX_SHARE = 0.5
"""Fraction of the time limit for compiling FlexAttention, which takes seconds per case."""
AHEAD_SHARE = 0.2
"""Fraction of the time limit for compiling in parallel, before the first measurement."""
ONE_CASE = 10.0
"""Seconds per case: with less time left, no further case is started."""

both_directions = pytest.mark.parametrize("direction", ["fwd", "bwd"])


@dataclass
class Allowance:
    """Time budget in seconds."""

    seconds: float
    spent: float = 0.0

    @property
    def used_up(self) -> bool:
        return self.spent >= self.seconds


@pytest.fixture
def budget(recorder: Recorder) -> Budget:
    """A fifth of the budget of other suites, because a round takes milliseconds."""
    return replace(recorder.budget, seconds=recorder.budget.seconds / 5)


@pytest.fixture(scope="session")
def time_limit(pytestconfig: pytest.Config) -> float:
    seconds: float = pytestconfig.getoption("--time-limit")
    return seconds


@pytest.fixture(scope="session")
def time_left(time_limit: float) -> Callable[[], float]:
    end = time.monotonic() + time_limit
    return lambda: end - time.monotonic()


@pytest.fixture(scope="session")
def compiling(time_limit: float) -> Allowance:
    return Allowance(FLEX_SHARE * time_limit)


@pytest.fixture(scope="session")
def usable(pytestconfig: pytest.Config) -> list[Variant]:
    named = dict.fromkeys(["naive", *pytestconfig.getoption("--variants")])
    return usable_variants(named, DEVICE)


@pytest.fixture(scope="session")
def failing(usable: list[Variant]) -> dict[str, str]:
    """Our variants that fail the smoke test, with reasons; they are not measured."""
    return failure_reasons([variant.name for variant in usable if not variant.is_peer])


def test_our_variants_pass_the_smoke_test(failing: dict[str, str]) -> None:
    assert failing == {}


@pytest.fixture(scope="session")
def compiled(
    request: pytest.FixtureRequest,
    usable: list[Variant],
    failing: dict[str, str],
    time_limit: float,
) -> None:
    """Compiles the selected cases, in the order of the tests."""
    names: dict[str, None] = {}
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        if "masked" in item.fixturenames:
            names |= dict.fromkeys(map(name_of, masked_cases()))
        if "on_grid" in item.fixturenames:
            case = item.callspec.params["on_grid"]
            assert isinstance(case, Case)
            names[name_of(case)] = None
    variants = [v.name for v in usable if v.name in COMPILED and v.name not in failing]
    if variants:
        compile_ahead(list(names), variants, AHEAD_SHARE * time_limit)


@pytest.fixture(scope="session")
def tried(
    recorder: Recorder,
    usable: list[Variant],
    failing: dict[str, str],
    compiled: None,
    time_limit: float,
    time_left: Callable[[], float],
    compiling: Allowance,
) -> Callable[[Case], Trial]:
    """Function that checks a case and records the variants skipped, with reasons."""
    candidates = [variant for variant in usable if variant.name not in failing]

    def check(case: Case) -> Trial:
        if time_left() < ONE_CASE:
            pytest.skip(f"the suite's time limit of {time_limit:.0f} s is used up")
        trial = _trial(case.to(DEVICE), candidates, compiling)
        recorder.skipped += [
            f"{name_of(case)}: {name}: {reason}"
            for name, reason in (trial.skipped | trial.broken).items()
        ]
        return trial

    return check


def _trial(case: Case, variants: list[Variant], compiling: Allowance) -> Trial:
    if not compiling.used_up:
        trial = try_out(case, variants)
        compiling.spent += trial.seconds.get("flex", 0.0)
        return trial
    trial = try_out(case, [variant for variant in variants if variant.name != "flex"])
    trial.skipped["flex"] = f"its compilation budget of {compiling.seconds:.0f} s is used up"
    return trial


def few_naive_rounds(contenders: list[Contender]) -> list[Contender]:
    return [replace(c, most_rounds=NAIVE_ROUNDS) if c.variant == "naive" else c for c in contenders]


@pytest.mark.parametrize("case", ceiling_cases(), ids=lambda case: case.name.split()[-1])
def test_ceiling(
    benchmark: BenchmarkFixture, recorder: Recorder, budget: Budget, case: Case
) -> None:
    """Hardware ceilings: a large matrix product and a large copy."""
    here = case.to(DEVICE)
    name = case.name.split()[-1]
    workload = {"matmul": large_product, "copy": large_copy}[name](here)
    contender = Contender(
        case=here, direction="fwd", variant=name, prepare=lambda: workload, error=math.nan
    )
    measure(benchmark, recorder, suite="gpu", contenders=[contender], budget=budget)


def large_product(case: Case) -> Workload:
    x, y = (torch.randn(case.M, case.M, device=case.device).to(case.dtype) for _ in range(2))
    return lambda: x @ y


def large_copy(case: Case) -> Workload:
    source, target = (
        torch.empty(2 * case.D, dtype=case.dtype, device=case.device).normal_() for _ in range(2)
    )
    return lambda: target.copy_(source)


@pytest.mark.parametrize("case", decode_cases(), ids=lambda case: f"{case_id(case)}-B{case.B}")
def test_decode(
    recorder: Recorder,
    benchmark: BenchmarkFixture,
    budget: Budget,
    time_left: Callable[[], float],
    failing: dict[str, str],
    case: Case,
) -> None:
    """Contiguous and paged caches, compared with a copy of equal size and with uncached peers."""
    if (reason := CudaBackend().unavailable_reason()) is not None:
        pytest.skip(reason)
    if time_left() < ONE_CASE:
        pytest.skip("the suite's time limit is used up")
    if (reason := failing.get("cuda_sm90", failing.get("cuda_sm80"))) is not None:
        pytest.skip(f"fails the smoke test: {reason}")
    caches = CacheContenders(case.to(DEVICE))
    contenders, skipped = caches.peers(VARIANTS[f"sdpa_{name}"] for name in ("flash", "cudnn"))
    recorder.skipped += [f"{case_id(case)}: {name}: {skipped[name]}" for name in skipped]
    contenders += [caches.copy(), *caches.ours("cuda_sm80", "cuda")]
    measure(benchmark, recorder, suite="gpu", contenders=contenders, budget=budget)


@pytest.fixture(scope="module")
def linear(
    request: pytest.FixtureRequest, recorder: Recorder, time_left: Callable[[], float]
) -> LinearContenders:
    if time_left() < ONE_CASE:
        pytest.skip("the suite's time limit is used up")
    case: Case = request.param
    found = LinearContenders(case.to(DEVICE))
    for name, backend in (("cuda", "cuda"), ("triton", "triton"), ("chunks", "reference")):
        found.add(name, partial(ours, case, backend))
    found.add("fla", lambda: fla(case))
    recorder.skipped += [f"{case_id(case)}: {name}: {why}" for name, why in found.skipped.items()]
    return found


@pytest.mark.parametrize("linear", linear_cases(), ids=name_of, indirect=True)
@both_directions
def test_linear(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    linear: LinearContenders,
    direction: Direction,
) -> None:
    """Linear attention, and causal attention of the same sizes."""
    measure(
        benchmark, recorder, suite="gpu", contenders=linear.contenders(direction), budget=budget
    )
    for name in ("cuda", "triton") if CudaBackend().unavailable_reason() is None else ("triton",):
        assert name not in linear.skipped, linear.skipped[name]


@pytest.fixture(scope="module")
def masked(tried: Callable[[Case], Trial]) -> list[Trial]:
    torch.compiler.reset()
    return [tried(case) for case in masked_cases()]


@both_directions
def test_cost_of_masks(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    masked: list[Trial],
    direction: Direction,
) -> None:
    """Interleaves all masks, because the cost of a mask is a ratio."""
    checked = [trial.checked for trial in masked]
    contenders = few_naive_rounds([c for case in checked for c in case.contenders(direction)])
    measure(benchmark, recorder, suite="gpu", contenders=contenders, budget=budget)
    assert [trial.broken for trial in masked if trial.broken] == []


@pytest.fixture(scope="module")
def on_grid(request: pytest.FixtureRequest, tried: Callable[[Case], Trial]) -> Trial:
    torch.compiler.reset()
    return tried(request.param)


@pytest.mark.parametrize("on_grid", grid_cases(), ids=name_of, indirect=True)
@both_directions
def test_grid(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    budget: Budget,
    on_grid: Trial,
    direction: Direction,
) -> None:
    contenders = few_naive_rounds(on_grid.checked.contenders(direction))
    measure(benchmark, recorder, suite="gpu", contenders=contenders, budget=budget)
    assert on_grid.broken == {}
