"""The table and the recommendations of `make gpu-tune`, from made-up times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.cases.tuning import TILES, Group, KernelVariant
from benchmarks.report.tune import (
    AGAIN,
    Compared,
    Failed,
    Result,
    conclusion,
    headings,
    line,
    noise,
    recommended,
)
from building.edits import Edit
from transformer_kernels.bench import Ratio

GROUP, OTHER = Group("sm90", "fwd", 128, 128), Group("sm80", "bwd", 64, 64)
CASES = ("full, S = 4096", "causal, S = 4096", "full, S = 16384", "causal, S = 16384")


def variant(change: str, group: Group = GROUP) -> KernelVariant:
    edits = (Edit(TILES, f"old {change}", f"new {change}"), Edit("cuda/x.h", "x", "y"))
    return KernelVariant(group=group, change=change, edits=edits)


def results(name: str, *ratios: float, group: Group = GROUP) -> list[Result]:
    return [
        Compared(
            group=group, variant=name, case=case, present_tflops=600.0, tflops=600.0 * ratio,
            ratio=Ratio(ratio, ratio - 0.004, ratio + 0.004),
        )
        for case, ratio in zip(CASES, ratios, strict=False)
    ]  # fmt: skip


FASTER, PARTLY = variant("faster"), variant("partly")


def test_a_variant_that_is_faster_in_every_case_is_recommended() -> None:
    found = [
        *results(FASTER.name, 1.05, 1.05, 1.05, 1.05),
        *results(PARTLY.name, 1.08, 1.0, 1.0, 0.99),
    ]
    assert recommended([PARTLY, FASTER], found) == [FASTER]


@pytest.mark.parametrize("ratios", [(1.2, 1.2, 1.2, 1.009), (1.05, 0.97, 1.05, 1.05), ()])
def test_a_variant_that_is_not_faster_in_every_case_is_not(ratios: Sequence[float]) -> None:
    assert recommended([FASTER], results(FASTER.name, *ratios)) == []


def test_a_variant_that_is_wrong_in_one_case_is_not() -> None:
    wrong = Failed(group=GROUP, variant=FASTER.name, case=CASES[3], reason="o: error 3.0")
    assert recommended([FASTER], [*results(FASTER.name, 1.05, 1.05, 1.05), wrong]) == []


def test_a_gain_within_the_noise_of_the_group_is_not() -> None:
    gain = results(FASTER.name, 1.05, 1.05, 1.05, 1.05)
    again = results(AGAIN, 1.0, 0.94, 1.0, 1.0)
    assert noise(GROUP, again) == pytest.approx(0.06)
    assert recommended([FASTER], [*gain, *again]) == []
    elsewhere = results(AGAIN, 1.0, 0.94, group=OTHER)
    assert recommended([FASTER], [*gain, *elsewhere]) == [FASTER]


def test_the_best_variant_of_each_group_is_recommended() -> None:
    better, other = variant("better"), variant("other", OTHER)
    found = [
        *results(FASTER.name, 1.2, 1.05, 1.2, 1.2),
        *results(better.name, 1.06, 1.06, 1.06, 1.06),
        *results(other.name, 1.03, 1.03, group=OTHER),
    ]
    assert recommended([FASTER, better, other], found) == [better, other]
    assert recommended([other, better, FASTER], found) == [other, better]


def test_the_conclusion_names_noise_and_edits() -> None:
    found = [
        *results(AGAIN, 1.002, 0.999, 1.0, 1.0),
        *results(FASTER.name, 1.05, 1.05, 1.05, 1.05),
        *results(AGAIN, 1.03, 1.0, group=OTHER),
    ]
    assert list(conclusion([FASTER], found)) == [
        "sm90-fwd-128: the present kernels differ from themselves by up to 0.2%",
        "sm80-bwd-64: the present kernels differ from themselves by up to 3.0%; repeat with more "
        "--seconds",
        "sm90-fwd-128-faster: faster in every case. Change",
        "  csrc/cuda/common/tile_config.h: old faster",
        "  -> new faster",
        "  csrc/cuda/x.h: as in benchmarks/cases/tuning.py",
    ]
    assert list(conclusion([PARTLY], found))[-1].startswith("No variant is faster")


def test_lines_have_the_columns_of_the_headings() -> None:
    (again,) = results(AGAIN, 1.0019)
    failed = Failed(group=GROUP, variant=FASTER.name, case=CASES[0], reason="o: error 3.0")
    assert line(again) == (
        "| sm90-fwd-128: present, again | full, S = 4096 | 600.0 | 601.1 | 1.002 | 0.998 to 1.006 |"
    )
    assert line(failed).endswith("| failed | o: error 3.0 |")
    assert len({text.count("|") for text in (*headings(), line(again), line(failed))}) == 1
