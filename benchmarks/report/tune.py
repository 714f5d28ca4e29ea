"""Results of `make gpu-tune` as a table, and the changes that they recommend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cases.tuning import TILES, Group, KernelVariant
from transformer_kernels.bench import Ratio

PRESENT, AGAIN = "present", "present, again"
"""Labels of the present kernels, and of a second library of them: the ratio of the two would be 1
if the measurement were exact."""
MARGIN = 0.01
"""A variant must be faster by more than this in every case."""
HEADINGS = ("variant", "case", "TFLOP/s: present", "variant", "ratio", "20% to 80%")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Speed of one variant in one case, relative to that of the present kernels."""

    group: Group
    variant: str
    case: str
    present_tflops: float
    tflops: float
    ratio: Ratio
    """time of the present kernels over that of the variant, round by round"""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A variant that fails or is wrong in one case, and was not measured."""

    group: Group
    variant: str
    case: str
    reason: str


Result = Compared | Failed


def headings() -> list[str]:
    """The first lines of the table, in Markdown."""
    return [_line(HEADINGS), _line(["---", "---", *["---:"] * 4])]


def line(result: Result) -> str:
    """A line of the table."""
    name = result.variant
    if result.variant in (PRESENT, AGAIN):
        name = f"{result.group}: {result.variant}"
    if isinstance(result, Failed):
        return _line([name, result.case, "", "", "failed", result.reason])
    ratio = result.ratio
    speeds = (f"{result.present_tflops:.1f}", f"{result.tflops:.1f}")
    return _line(
        [name, result.case, *speeds, f"{ratio.median:.3f}", f"{ratio.p20:.3f} to {ratio.p80:.3f}"]
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def noise(group: Group, results: Iterable[Result]) -> float:
    """Returns the largest difference between the present kernels and themselves."""
    return max(
        (
            abs(result.ratio.median - 1.0)
            for result in results
            if isinstance(result, Compared) and (result.group, result.variant) == (group, AGAIN)
        ),
        default=0.0,
    )


def recommended(
    variants: Iterable[KernelVariant], results: Sequence[Result]
) -> list[KernelVariant]:
    """Returns the variants that are faster than MARGIN and the noise in every case.

    Variants of one group mostly change the same row. Of these, only the one with the best worst
    case is returned.
    """
    best: dict[Group, tuple[float, KernelVariant]] = {}
    for variant in variants:
        group, own = variant.group, [one for one in results if one.variant == variant.name]
        ratios = [one.ratio.median for one in own if isinstance(one, Compared)]
        if not ratios or len(ratios) < len(own):
            continue
        worst = min(ratios)
        if worst > 1.0 + max(MARGIN, noise(group, results)) and worst > best.get(group, (0.0,))[0]:
            best[group] = (worst, variant)
    return [variant for _, variant in best.values()]


def conclusion(variants: Sequence[KernelVariant], results: Sequence[Result]) -> Iterator[str]:
    """Lines with the noise of each group and the edits of the recommended variants."""
    for group in dict.fromkeys(result.group for result in results):
        measured = noise(group, results)
        advice = "; repeat with more --seconds" if measured > MARGIN else ""
        yield f"{group}: the present kernels differ from themselves by up to {measured:.1%}{advice}"
    found = recommended(variants, results)
    if not found:
        yield f"No variant is faster by more than {MARGIN:.0%} in every case."
    for variant in found:
        yield f"{variant}: faster in every case. Change"
        for edit in variant.edits:
            if edit.source == TILES:
                yield f"  csrc/{edit.source}: {edit.old.strip()}"
                yield f"  -> {edit.new.strip()}"
            else:
                yield f"  csrc/{edit.source}: as in benchmarks/cases/tuning.py"
