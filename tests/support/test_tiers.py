"""The sample of `make test` covers every option, size, backend and dtype, within its budget, and
shares divide all other tests."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Hashable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from building.extension import ROOT
from tests.support import budget
from tests.support.budget import UNMEASURED, Budget, Clock, Costs, Records
from tests.support.cases import CASES, Case
from tests.support.decode_cases import DECODE_CASES
from tests.support.masks import CAUSAL, padding
from tests.support.shares import BUILD, COMPILING, WITH_CUDA, Share
from tests.support.tiers import cover, crossed, each, features, quick_items
from tests.support.varlen_cases import VARLEN_CASES

VALUES: tuple[object, ...] = ([], {})
BACKENDS, DTYPES = ("reference", "cpu", "cuda", "triton"), ("float32", "float16")
COSTS = Costs(
    Budget(calibration=2.0, elapsed=10.0, folders={"a": 3.0, "a/b": 1.0}),
    Records("a machine", 1.0, quick={"tests/a/t.py::cheap": 0.1, "tests/a/t.py::dear": 0.9}),
)


def table(cases: Sequence[Any]) -> list[dict[str, Any]]:
    ways = itertools.product(cases, BACKENDS, DTYPES)
    return [{"case": case, "backend": backend, "dtype": dtype} for case, backend, dtype in ways]


def features_of(cases: Sequence[Any]) -> set[tuple[str, Any]]:
    return set(itertools.chain(*map(features, cases)))


def kinds(found: Set[tuple[str, Hashable]]) -> set[tuple[str, Hashable]]:
    """The kinds of masks, and the options without their values."""
    return {(name, value if name == "mask" else None) for name, value in found}


def item(name: str, *marks: str, **parameters: Any) -> Any:
    def closest(mark: str) -> str | None:
        return mark if mark in marks else None

    return Mock(nodeid=name, callspec=Mock(params=parameters), get_closest_marker=closest)


def test_features_are_sizes_options_and_kinds_of_masks() -> None:
    plain, other = Case(name="plain"), Case(name="other", M=7, mask=(CAUSAL, padding()))
    assert set(features(plain)) == set()
    window = "Window top_left unbounded False"
    kinds = {("mask", window), ("mask", "KeyRange"), ("masks", ("KeyRange", window))}
    assert set(features(other)) == {("M", 7), *kinds}


@pytest.mark.parametrize("cases", [CASES, VARLEN_CASES, DECODE_CASES], ids=lambda x: x[0].name)
def test_every_backend_has_every_option_and_every_value_is_tested(cases: Sequence[Any]) -> None:
    parameters = table(cases)
    chosen = [parameters[index] for index in cover(parameters)]
    everything = features_of(cases)
    assert features_of([one["case"] for one in chosen]) == everything
    options = kinds({one for one in everything if one[0] != "masks" and type(one[1]) is not int})
    for backend in BACKENDS:
        own = [one for one in chosen if one["backend"] == backend]
        assert kinds(features_of([one["case"] for one in own])) >= options
        assert {one["dtype"] for one in own} == {*DTYPES}
    assert len(chosen) < len(parameters) / 4


def test_every_value_of_every_parameter_is_in_the_sample() -> None:
    """Values without a hash, too."""
    parameters = [{"a": a, "b": b, "c": c} for a in range(5) for b in "xyz" for c in VALUES]
    chosen = [parameters[index] for index in cover(parameters)]
    assert len(chosen) == 5
    for name in "abc":
        assert {str(one[name]) for one in chosen} == {str(one[name]) for one in parameters}
    assert cover([{}]) == [0]


def test_large_cases_are_left_out_where_small_ones_have_the_same_aspects() -> None:
    small = Case(name="small", M=7, softcap=2.0)
    large = replace(small, name="large", N=1000)
    assert cover([{"case": large}, {"case": small}]) == [1]


def test_combinations_are_named_by_case_and_way() -> None:
    (one, other) = crossed(["case"], [("cpu", 1), ("cuda", 2)])
    assert (one.id, other.id) == ("case-cpu-1", "case-cuda-2")
    assert tuple(one.values) == ("case", "cpu", 1)


def test_one_item_runs_each_value_as_a_subtest() -> None:
    """A failing one does not end the others: the pytest fixture records it."""
    found: list[tuple[int, str]] = []
    labels: list[str] = []

    @pytest.mark.quick
    @each(("number", "text"), [(1, "a"), pytest.param(2, "b")], ids=["one", "two"])
    def test(number: int, text: str) -> None:
        """Documented."""
        found.append((number, text))
        raise RuntimeError

    def subtest(label: str) -> contextlib.AbstractContextManager[None]:
        labels.append(label)
        return contextlib.suppress(RuntimeError)

    test(Mock(test=subtest))
    assert (found, labels) == ([(1, "a"), (2, "b")], ["one", "two"])
    assert (test.__name__, test.__doc__) == ("test", "Documented.")
    assert [mark.name for mark in vars(test)["pytestmark"]] == ["quick"]


def test_the_quick_tier_is_what_is_marked_or_recorded_as_cheap() -> None:
    cheap, dear = "tests/a/t.py::cheap", "tests/a/t.py::dear"
    names = [f"{cheap}[{n}]" for n in range(3)]
    items = [item(name, n=n // 2) for n, name in enumerate(names)]
    items += [item(dear), item("tests/a/t.py::new"), item("tests/a/t.py::marked", "quick")]
    assert quick_items(items, COSTS) == [names[0], names[2], "tests/a/t.py::marked"]
    assert quick_items(items, COSTS, new=True)[2] == "tests/a/t.py::new"
    assert quick_items([item(cheap, "exhaustive")], COSTS) == []
    assert quick_items([item(dear, "quick")], COSTS) == [dear]


def test_costs_are_seconds_of_the_reference_machine() -> None:
    assert COSTS.of("tests/a/t.py::cheap", 3) == pytest.approx(0.6)
    assert COSTS.of("tests/a/t.py::new", 3) == UNMEASURED


def test_a_folder_beyond_or_without_a_budget_is_refused() -> None:
    """With its dearest tests."""
    COSTS.check(["tests/a/t.py::dear", "tests/a/t.py::new", "tests/a/b/t.py::new"])
    with pytest.raises(pytest.UsageError) as error:
        COSTS.check(["tests/a/t.py::dear", "tests/a/t.py::new[0]", "tests/a/t.py::slow"])
    message = str(error.value)
    assert "tests/a: 3.8 s of 3, 0.8 too many" in message
    assert message.index("1.8  tests/a/t.py::dear") < message.index("1.0  tests/a/t.py::slow")
    with pytest.raises(pytest.UsageError, match=r"tests/a/b: 2\.0 s of 1"):
        COSTS.check(["tests/a/b/t.py::new", "tests/a/b/t.py::slow"])
    with pytest.raises(pytest.UsageError, match="has no budget for its folder"):
        COSTS.check(["tests/c/t.py::new"])


def test_durations_are_recorded_in_seconds_of_the_first_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item has several phases; the record is the mean of the items. Tests that are gone have no
    record."""
    monkeypatch.setattr(budget, "DURATIONS", tmp_path / "durations.json")
    monkeypatch.setattr(budget, "calibrate", lambda: 1.0)  # the seconds of the fixed loop
    here = "tests/support/test_tiers.py::"
    known, other = here + "test_costs_are_seconds_of_the_reference_machine", here + "table"
    Records("a slow one", 2.0, {known: 9.0, other: 3.0, "tests/gone.py::test": 1.0}).write()
    clock = Clock(Mock(getoption={"tier": "new", "record_durations": True}.get))
    for name, seconds in ((f"{known}[0]", 0.5), (f"{known}[0]", 0.25), (f"{known}[1]", 0.25)):
        clock.pytest_runtest_logreport(Mock(nodeid=name, duration=seconds))
    clock.pytest_sessionfinish(Mock(exitstatus=0))
    assert Records.read() == Records("a slow one", 2.0, {known: 1.0, other: 3.0})


@pytest.mark.parametrize("calibration", [1e3, 1e-3])
def test_a_tier_that_takes_too_long_fails(
    calibration: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "calibrate", lambda: 1.0)
    options = {"tier": "quick", "hold_elapsed": True}
    clock, session = Clock(Mock(getoption=options.get)), Mock(exitstatus=0)
    monkeypatch.setattr(Budget, "read", lambda: Budget(calibration, 0.01, {}))
    time.sleep(0.01)
    clock.pytest_sessionfinish(session)
    assert session.exitstatus == (calibration > 1)


NAMES = [f"tests/a/test_b.py::test_c[{n}-float32]" for n in range(3000)]


def shares(count: int, names: list[str], seconds: dict[str, float] | None = None) -> list[set[str]]:
    return [Share(k, count).of(names, seconds or {}) for k in range(1, count + 1)]


def test_every_test_is_in_one_share_and_shares_have_similar_sizes() -> None:
    found = shares(3, NAMES)
    assert set.union(*found) == {*NAMES}
    assert sum(map(len, found)) == len(NAMES)
    assert all(abs(len(share) - 1000) < 100 for share in found)
    assert Share.parse("1/1").of(NAMES, {}) == {*NAMES}


def test_long_tests_balance_the_shares_and_move_no_other() -> None:
    """Together with the build of CUDA kernels in the last share."""
    long = [f"tests/a/test_long.py::test_{n}" for n in range(60)]
    seconds = {name: 10.0 + n for n, name in enumerate(long)} | {"tests/a/test_b.py::test_c": 0.01}
    found, without = shares(3, [*NAMES, *long], seconds), shares(3, NAMES, seconds)
    loads = [sum(seconds[name.partition("[")[0]] for name in share) for share in found]
    loads[-1] += BUILD
    assert max(loads) - min(loads) < 10.0
    assert [share - {*long} for share in found] == without


@pytest.mark.parametrize("folder", COMPILING)
def test_files_that_compile_kernels_are_in_one_share(folder: str) -> None:
    for file in ("test_a.py", "test_b.py", "c/test_d.py"):
        names = [f"{folder}{file}::test_c[{n}-float32]" for n in range(100)]
        for seconds in (0.0, 5.0):
            found = shares(8, names, {f"{folder}{file}::test_c": seconds})
            assert sorted(map(len, found)) == [0] * 7 + [100]


def test_ci_builds_cuda_kernels_for_the_share_that_tests_them() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert re.search(r'if \[ "\$share" = "\$shares" \]; then chips=9\.0', script)
    names = [f"{file}::test_x" for file in WITH_CUDA]
    assert shares(8, names)[-1] == {*names}


@each("text", ["", "2", "0/3", "4/3", "-1/3", "1/0", "1/3 ", "²/3"])
def test_other_forms_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"--share must be K/N .* such as 2/8, got"):
        Share.parse(text)
