"""Checks before timing, ceilings, caches and processes of the benchmarks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_cases import decode_cases, grid_cases, linear_cases, masked_cases, name_of
from benchmarks.runner import caches, checks
from benchmarks.runner import ceilings as ceilings_module
from benchmarks.runner.caches import Caches, cache_attends, in_pages
from benchmarks.runner.ceilings import GEMM, SUM, ceilings, gemm, products, reading
from benchmarks.runner.checks import (
    Sizes,
    causal_sizes,
    check_at,
    check_quickly,
    checked_calls,
    relative_error,
)
from benchmarks.runner.isolated import failures
from transformer_kernels import attention
from transformer_kernels.bench import Attend, Case, Direction, Variant, usable_variants
from transformer_kernels.bench.contenders import check
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.mask import Mask

CASE = Case(
    name="", H_q=2, H_kv=2, M=40, N=40, D=8, D_v=8, mask=Mask.causal(), dtype=torch.bfloat16
)


def test_large_cases_are_checked_at_a_shorter_length_where_products_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fast, slow_scores, checked, variants in (
        (False, 3201, 40, ["naive", "sdpa"]),
        (False, 3200, 20, ["sdpa"]),
        (False, 800, 10, ["sdpa"]),
        (True, 3200, 40, ["naive", "sdpa"]),
    ):
        monkeypatch.setattr(checks, "SLOW_SCORES", slow_scores)
        monkeypatch.setattr(checks, "has_fast_products", lambda _, fast=fast: fast)
        ready = check_quickly(CASE, usable_variants(["naive", "sdpa"]))
        assert ready.expected.exact.o.shape[-2] == checked
        assert [one.variant for one in ready.contenders("fwd")] == variants
        assert ready.inputs.q.shape == (1, 2, 40, 8)


def test_the_case_runs_at_its_own_length_with_the_errors_of_the_shorter_one() -> None:
    bias = torch.randn(1, 2, 40, 40, dtype=torch.bfloat16)
    case = replace(CASE, bias=bias)
    variants = usable_variants(["naive", "cpu"])
    (contender,) = check_at(16, case, variants).contenders("fwd")
    shorter = replace(case, M=16, N=16, bias=bias[..., :16, :16])
    expected = {one.variant: one.error for one in check(shorter, variants).contenders("fwd")}
    assert contender.error == expected["cpu"]
    assert contender.case is case
    contender.prepare()()


def test_an_error_beyond_the_bound_or_nan_stops_before_timing() -> None:
    x = torch.tensor([1.0, 4.0])
    assert relative_error("", x + 0.2, x, 0.051) == pytest.approx(0.05)
    for wrong in (x + 0.2, x * torch.nan):
        with pytest.raises(AssertionError, match="of the largest value"):
            relative_error("", wrong, x, 0.049)
        calls = {name: lambda y=y: lambda: y for name, y in (("sdpa", x), ("cpu", wrong))}
        with pytest.raises(AssertionError, match="a model, float32, cpu: error"):
            checked_calls(Sizes(name="a model", M=2, N=2), "fwd", calls, 0.049)


def test_a_workload_of_more_than_one_call_has_no_rates() -> None:
    step = Sizes(name="", M=4, N=4)
    assert math.isnan(step.visible)
    assert math.isnan(step.operations("step"))
    assert math.isnan(step.traffic("step"))
    causal = replace(CASE, dtype=torch.float32)
    sizes = causal_sizes("", H=2, S=40, dtype=torch.float32)
    assert sizes.visible == causal.visible
    assert replace(sizes, D=8, D_v=8).operations("fwd") == causal.operations("fwd")


WINDOWED = Case(name="", B=2, H_q=4, H_kv=2, M=96, N=80, D=32, D_v=48)


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("mask", [None, Mask.window(20, 0)])
def test_the_product_has_as_many_operations_as_the_case(
    direction: Direction, mask: Mask | None
) -> None:
    case = replace(WINDOWED, mask=mask)
    contender = gemm(case, direction)
    with FlopCounterMode(display=False) as counter:
        contender.prepare()()
    assert counter.get_total_flops() == pytest.approx(case.operations(direction), rel=0.02)
    assert (contender.variant, contender.direction, contender.case) == (GEMM, direction, case)
    assert math.isnan(contender.error)


def test_products_in_half_precision_need_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, expected in (("epyc-avx512", []), ("xeon-amx", [GEMM])):
        monkeypatch.setattr(ceilings_module, "device_slug", lambda device=device: device)
        half = replace(WINDOWED, dtype=torch.bfloat16)
        assert [one.variant for one in products(half, "fwd")] == expected
        assert [one.variant for one in products(WINDOWED, "fwd")] == [GEMM]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_reads_every_byte_of_keys_and_values(dtype: torch.dtype) -> None:
    case = Case(name="", M=1, N=6, D=8, D_v=8, dtype=dtype)
    keys_and_values = torch.stack(case.inputs()[1:3])
    contender = reading(case, keys_and_values)
    got = contender.prepare()()
    assert isinstance(got, Tensor)
    words = keys_and_values.view(torch.uint8).numpy().view("float32")
    torch.testing.assert_close(got, torch.from_numpy(words).sum(), equal_nan=True)
    assert contender.variant == SUM


def test_a_step_of_decoding_is_limited_by_bandwidth() -> None:
    case = Case(name="", M=1, N=6)
    assert [one.variant for one in ceilings(case, "fwd")] == [SUM]
    assert ceilings(case, "fwd+bwd") == []
    assert [one.variant for one in ceilings(WINDOWED, "fwd+bwd")] == [GEMM]


NAMES = ["caches: none", "caches: in order", "caches: pages of 64", "caches: pages of 16"]
DECODED = replace(decode_cases()[0], B=3, H_q=4, H_kv=2, N=128, D=8, D_v=8)


def test_all_caches_give_the_same_result_from_their_own_copies() -> None:
    q, k, v, _ = replace(DECODED, dtype=torch.float32).inputs()
    attends = cache_attends(k, v, "cpu")
    assert list(attends) == NAMES
    expected = attention(q, k, v)
    for attend in attends.values():
        assert_same_function(attend(q, k.fill_(0), v.fill_(0)), expected)


def test_pages_are_at_the_positions_in_the_table() -> None:
    x = torch.arange(2 * 3 * 8).reshape(2, 1, 24, 1)
    table = torch.tensor([[4, 0, 5], [1, 3, 2]])
    pages = in_pages(x, table)
    assert pages.shape == (6, 1, 8, 1)
    for b in range(2):
        together = torch.cat([pages[n, 0, :, 0] for n in table[b]])
        assert torch.equal(together, x[b, 0, :, 0])


def test_contenders_can_be_measured() -> None:
    ours = Caches(DECODED).ours("mine", "cpu")
    assert [(one.case.name, one.variant) for one in ours] == [(name, "mine") for name in NAMES]
    for one in ours:
        assert 0.0 < one.error < 0.02
        o = one.prepare()()
        assert isinstance(o, Tensor)
        assert o.shape == (3, 4, 1, 8)


def test_a_copy_moves_as_many_bytes_as_keys_and_values_have() -> None:
    contenders = Caches(DECODED)
    copied = contenders.copy().prepare()()
    assert isinstance(copied, Tensor)
    assert torch.equal(copied, contenders.inputs.k)
    assert 2 * copied.nbytes == sum(x.nbytes for x in contenders.inputs[1:3])


def test_peers_that_cannot_run_are_skipped() -> None:
    def refuse(_case: Case) -> Attend:
        raise ValueError("knows no groups")

    (sdpa,) = usable_variants(["sdpa"])
    contenders, skipped = Caches(DECODED).peers([sdpa, Variant("none", "none", refuse)])
    assert [(one.case.name, one.variant) for one in contenders] == [("caches: none", "sdpa")]
    assert skipped == {"none": "knows no groups"}


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_in_the_last_entry(make: Callable[..., Attend]) -> Callable[..., Attend]:
        def make_wrong(*arguments: object) -> Attend:
            attend = make(*arguments)
            return lambda *x: attend(*x) + torch.tensor([0.0, 0.0, 0.5])[:, None, None, None]

        return make_wrong

    monkeypatch.setattr(caches, "_on", wrong_in_the_last_entry(caches._on))
    with pytest.raises(AssertionError, match="mine, caches: none: o"):
        Caches(DECODED).ours("mine", "cpu")


HANGS = "import time; print('begun', flush=True); time.sleep(60)"
DIES = "import os; os.abort()"
FAILS = "import sys; print('wrong'); print('width 64: no kernel'); print(); sys.exit(1)"


@pytest.mark.exhaustive
def test_a_failing_command_does_not_affect_the_others() -> None:
    commands = [[sys.executable, "-c", code] for code in (HANGS, DIES, FAILS, "print('fine')")]
    start = time.monotonic()
    assert failures(commands, 10.0, workers=4) == [
        "still running after 10 s",
        "exit status -6: no output",
        "exit status 1: width 64: no kernel",
        None,
    ]
    assert time.monotonic() - start < 40.0


def test_nothing_is_started_without_time() -> None:
    reasons = failures([[sys.executable, "-c", "pass"]], 0.0, workers=1)
    assert reasons == ["not started within 0 s"]


def test_there_may_be_no_time_limit() -> None:
    assert failures([[sys.executable, "-c", "pass"]], math.inf, workers=1) == [None]


def test_names_of_cases_are_unique() -> None:
    cases = [*masked_cases(), *grid_cases(), *linear_cases()]
    assert len({name_of(case) for case in cases}) == len(cases)
