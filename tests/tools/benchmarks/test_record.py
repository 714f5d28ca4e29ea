from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.gpu_cases import causal
from benchmarks.runner.record import as_text, call_of, latest, longest_ago_first, runs_of
from tests.tools.bench.example import row
from transformer_kernels.bench import Case, Row

LENGTHS = (8192, 1024, 4096, 2048)
CASES = {f"S{S}": causal(S, 64) for S in LENGTHS}
CASES["D128"] = causal(8192, 128)
VARIANTS = ("cuda_sm90", "sdpa_cudnn")


def rows(names: str, day: int, variant: str = "cuda_sm90") -> list[Row]:
    """Rows of cases. Without their mask, whose visible fraction takes seconds to compute."""
    cases = [replace(CASES[name], mask=None) for name in names.split()]
    date = f"2026-02-0{day}T00:00:00Z"
    return [replace(row(case=case), variant=variant, date=date) for case in cases]


def order(measured: list[Row], items: str = " ".join(CASES)) -> str:
    def case_of(item: str) -> Case | None:
        return CASES.get(item)

    return " ".join(longest_ago_first(items.split(), case_of, measured, VARIANTS))


def test_the_order_stays_without_rows_and_after_a_complete_run() -> None:
    given = "S8192 S1024 S4096 S2048 D128"
    assert order([]) == order(rows(given, 1)) == given


def test_a_run_that_ended_early_is_continued() -> None:
    assert order(rows("S8192 S1024", 1)) == "S4096 S2048 D128 S8192 S1024"
    measured = [*rows("S4096 S2048 D128 S8192", 2), *rows("S8192 S1024", 1)]
    assert order(measured) == "S1024 S8192 S4096 S2048 D128"


def test_rows_of_other_variants_do_not_count() -> None:
    measured = rows("S8192", 1, "naive")
    assert order(measured) == order([])
    measured += rows("S1024", 1, "sdpa_cudnn")
    assert order(measured) == "S8192 S4096 S2048 D128 S1024"


def test_other_dtypes_are_other_cases() -> None:
    measured = [replace(one, dtype="float16") for one in rows("S8192", 1)]
    assert order(measured) == order([])


def test_other_tests_and_both_directions_of_a_case_stay_in_their_places() -> None:
    items = "ceiling S8192 S8192 masks S1024 S1024 decode"
    assert order(rows("S8192", 1), items) == "ceiling S1024 S1024 masks S8192 S8192 decode"


def test_latest_keeps_the_last_row_of_each_case_and_variant() -> None:
    others = [replace(row(), variant="naive"), replace(row(), N=8), replace(row(), threads=7)]
    old = [row(), *others]
    new = replace(row(), date="2026-02-01T00:00:00Z")
    for order in ([*old, new], [new, *old]):
        assert sorted(map(repr, latest(order))) == sorted(map(repr, [new, *others]))


def test_threads_of_the_host_do_not_identify_a_call_on_a_gpu() -> None:
    for suite, calls in (("gpu", 1), ("cpu", 2)):
        rows = [replace(row(), suite=suite, threads=threads) for threads in (1, 16)]
        assert len({tuple(call_of(one).values()) for one in rows}) == calls
        assert len(latest(rows)) == calls


def test_runs_are_separated_and_the_last_comes_first() -> None:
    first, second = (replace(row(), date=f"2026-02-0{day}T00:00:00Z") for day in (1, 2))
    naive = replace(first, variant="naive")
    assert runs_of([first, second, naive]) == [[second], [first, naive]]


def test_text_has_a_title_per_call_and_the_time_of_each_variant_over_the_first() -> None:
    step = replace(row(), direction="step", tflops=math.nan, gbytes_s=math.nan, error=math.nan)
    lines = as_text([row(), replace(row(), variant="naive", median_ms=5.0), step])
    assert [line for line in lines if line.endswith(("fwd", "step"))] == [
        "causal, float16, B 1, H 8/8, 4 x 4, D 64, fwd",
        "causal, float16, B 1, H 8/8, 4 x 4, D 64, step",
    ]
    ours, naive, steps = (line for line in lines if "threads" in line)
    assert "cpu " in ours
    assert "2.000 ms  (1.500 .. 2.500)    1.000x       3.0 MiB  error 1.2e-07" in ours
    assert "2.500x" in naive
    assert "TFLOP/s" in naive
    assert "nan" not in steps
    assert "error" not in steps
