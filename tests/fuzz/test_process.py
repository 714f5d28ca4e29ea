"""Calls in a child process: every kind of failure is reported, and the next call runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.fuzz import process
from tests.fuzz.faulty import Faulty
from tests.fuzz.process import ExecutorProcess, Failure

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with closing(ExecutorProcess()) as one:
        yield one


def failure(executor: ExecutorProcess, call: Faulty) -> Failure:
    found = executor.run(call)
    assert found is not None
    assert executor.run(Faulty(fault="none")) is None
    return found


def test_a_failed_check_is_wrong(executor: ExecutorProcess) -> None:
    assert failure(executor, Faulty(fault="wrong")) == Failure("wrong", "o: wrong")


def test_an_unexpected_exception_is_wrong(executor: ExecutorProcess) -> None:
    found = failure(executor, Faulty(fault="error"))
    assert found.signature == ("wrong", "KeyError")
    assert "in check" in found.text


def test_a_crash_is_found(executor: ExecutorProcess) -> None:
    assert failure(executor, Faulty(fault="crash")).signature == ("crash", "SIGABRT")


def test_an_exit_is_found(executor: ExecutorProcess) -> None:
    assert failure(executor, Faulty(fault="exit")).signature == ("crash", "exit status 3")


def test_a_hang_is_found(executor: ExecutorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CALL_SECONDS", 0.5)
    found = executor.run(Faulty(fault="hang"))
    assert found is not None
    assert found.kind == "hang"
