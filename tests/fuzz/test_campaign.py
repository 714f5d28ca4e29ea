"""Campaigns: failures are found and shrunk, each kind apart. Child processes: every kind of failure
is reported, and the next call runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.fuzz import campaign, process
from tests.fuzz.calls import Call, Fault, Faulty
from tests.fuzz.campaign import GENERATORS, run_campaign
from tests.fuzz.process import ExecutorProcess, Failure
from tests.fuzz.valid.call import Valid
from tests.fuzz.valid.draw import dense, valid_calls
from tests.support.cases import Case


class Planted:
    """An executor with two faults: with more than 5 queries, and rarely with more than 40 keys."""

    def __init__(self, sanitize: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def run(self, call: Call) -> Failure | None:
        case = case_of(call)
        if case.N > 40 and case.H_q == 3 * case.H_kv:
            return Failure("crash", "SIGSEGV")
        return Failure("wrong", f"o: {case.M} queries") if case.M > 5 else None


def case_of(call: Call) -> Case:
    assert isinstance(call, Valid)
    assert isinstance(call.case, Case)
    return call.case


@pytest.fixture
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "ExecutorProcess", Planted)
    monkeypatch.setattr(campaign, "MAX_FINDINGS", 2)
    monkeypatch.setitem(GENERATORS, "planted", lambda: valid_calls("cpu", dense))


@pytest.mark.usefixtures("_planted")
def test_failures_are_shrunk() -> None:
    report = run_campaign("planted", 60.0, 1)
    assert report.seeds == [1, 2]
    for finding in report.findings:
        case = case_of(finding.call)
        assert (case.mask, case.bias, case.dropout_p, case.B) == ((), None, 0.0, 1)
        if finding.failure.kind == "crash":
            assert case.M == 0
            assert 40 < case.N <= 64
        else:
            assert 5 < case.M <= 15
            assert (case.N, case.H_q) == (0, 1)


@pytest.mark.usefixtures("_planted")
def test_a_seed_draws_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "MAX_FINDINGS", 1)
    first, again = (run_campaign("planted", 60.0, 1).findings for _ in range(2))
    assert first == again


@pytest.mark.usefixtures("_planted")
def test_a_failure_that_does_not_come_again_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Once(Planted):
        failed = False

        def run(self, call: Call) -> Failure | None:
            failure = None if self.failed else super().run(call)
            self.failed = self.failed or failure is not None
            return failure

    monkeypatch.setattr(campaign, "ExecutorProcess", Once)
    monkeypatch.setattr(campaign, "MAX_FINDINGS", 1)
    (finding,) = run_campaign("planted", 60.0, 1).findings
    assert Planted(False).run(finding.call) == finding.failure


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with closing(ExecutorProcess()) as one:
        yield one


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "signature", "text"),
    [
        ("wrong", ("wrong", "o"), "o: wrong"),
        ("error", ("wrong", "KeyError"), "in check"),
        ("crash", ("crash", "SIGABRT"), ""),
        ("exit", ("crash", "exit status 3"), ""),
    ],
)
def test_failures_of_the_child_are_found(
    executor: ExecutorProcess, fault: Fault, signature: tuple[str, str], text: str
) -> None:
    found = executor.run(Faulty(fault=fault))
    assert found is not None
    assert found.signature == signature
    assert text in found.text
    assert executor.run(Faulty(fault="none")) is None


@pytest.mark.exhaustive
def test_a_hang_is_found(executor: ExecutorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CALL_SECONDS", 0.5)
    found = executor.run(Faulty(fault="hang"))
    assert found is not None
    assert found.kind == "hang"
