"""One launch of two processes for `make test`: a part of every file of checks."""

from __future__ import annotations

from tests.distributed import checks, context_checks, divided, documents, dtensor_checks


def check_sample() -> None:
    divided.check_cases("zigzag", "1", "float64", "auto", "3", "22")
    divided.check_cases("contiguous", "2", "float64", "auto", "5", "22")
    documents.check_sample()
    context_checks.check_switch()
    dtensor_checks.check_sample()
    checks.check_errors()
    checks.check_disagreement()
    checks.check_messages()
