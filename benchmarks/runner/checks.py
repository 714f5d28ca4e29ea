"""Checks of cases whose full length plain torch would take minutes for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.runner.ceilings import has_fast_products
from transformer_kernels.bench import Case, Variant
from transformer_kernels.bench.contenders import CheckedCase, check

SLOW_SCORES = 2**24
"""With as many scores, naive attention takes many seconds a call where products are slow."""


def check_quickly(case: Case, variants: Sequence[Variant]) -> CheckedCase:
    """Checks a case; without naive attention, and at a shorter length, where that is slow.

    In half precision on a CPU whose products in it are slow, a case with SLOW_SCORES or more is
    checked at half its length, or a quarter and so on. Its mask must not depend on the length.
    """
    length = case.N
    if not has_fast_products(case.dtype):
        while case.B * case.H_q * length**2 >= SLOW_SCORES:
            length //= 2
    return check(case, list(variants)) if length == case.N else check_at(length, case, variants)


def check_at(length: int, case: Case, variants: Sequence[Variant]) -> CheckedCase:
    """Checks a case at a shorter length.

    Args:
        length: number of queries and keys of the check.
        case: the case. Its mask must not depend on the length.
        variants: variants to check; they include "naive".

    Returns:
        The case at its own length, without naive attention, with the errors of the shorter one.
    """
    bias = None if case.bias is None else case.bias[..., :length, :length]
    shorter = check(replace(case, M=length, N=length, bias=bias), list(variants))
    attends = {one.name: one.attend_for(case) for one in variants if one.name != "naive"}
    return replace(shorter, case=case, inputs=case.inputs(), attends=attends)
