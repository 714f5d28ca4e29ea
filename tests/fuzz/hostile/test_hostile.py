"""The generator of hostile calls: every value can be made, and wrong errors are reported."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.fuzz.hostile.arguments import FUNCTIONS, VARIANTS
from tests.fuzz.hostile.calls import Hostile, arguments_of, backends_of, hostile_calls, values_of
from tests.fuzz.hostile.values import NEVER_VALID, VALUES
from tests.support.tiers import each

VALID = {
    "float": torch.randn(2, 4, 5, 8),
    "float16": torch.randn(2, 4, 5, 8).half(),
    "empty": torch.randn(2, 4, 0, 8),
    "bool": torch.ones(5, 7, dtype=torch.bool),
    "int32": torch.zeros(2, 3, dtype=torch.int32),
    "lengths": torch.tensor([3, 5]),
    "scalar": torch.tensor(3),
}


@pytest.mark.filterwarnings("ignore")
@each("valid", VALID.values(), ids=VALID)
def test_every_value_can_be_made(valid: Tensor) -> None:
    for make in VALUES.values():
        make(valid)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_are_valid_without_a_hostile_value(function: str, variant: int) -> None:
    called = FUNCTIONS[function]
    _, arguments = called.given(VARIANTS[variant], "cpu")
    called.call(**arguments)


CALLS = (
    Hostile(function="attention", argument="q", value="None"),
    Hostile(function="attention_varlen", argument="cu_seqlens_q", value="tensor: flipped"),
    Hostile(function="attention_decode, paged", argument="block_table", value="tensor: largest"),
    Hostile(function="Mask.dense", argument="attn_mask", value="tensor: freed", variant=1),
    Hostile(
        function="operator forward, cache", argument="cache_seqlens", value="argument q",
        backend="cpu",
    ),
)  # fmt: skip


@each("call", CALLS, ids=repr)
def test_calls_pass(call: Hostile) -> None:
    call.check()


@pytest.mark.quick
@each("function", FUNCTIONS)
def test_no_argument_can_be_an_object(function: str) -> None:
    (backend,) = backends_of(function, ["auto"])
    for name, variant in itertools.product(arguments_of(function), range(len(VARIANTS))):
        Hostile(
            function=function, argument=name, value="object", backend=backend, variant=variant
        ).check()


@given(hostile_calls(["auto", "reference"]))
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_drawn_calls_pass_and_reproduce(call: Hostile) -> None:
    assert eval(repr(call), {"Hostile": Hostile}) == call
    call.check()


def test_draws_reach_every_function_and_value() -> None:
    for function in FUNCTIONS:
        reached = {value for name in arguments_of(function) for value in values_of(function, name)}
        assert reached >= NEVER_VALID


@pytest.mark.parametrize(
    ("outcome", "report"),
    [
        (KeyError("q"), "raised KeyError: 'q'"),
        (UnicodeError("q"), "raised UnicodeError: q"),
        (ValueError("q is wrong"), "raised ValueError: q is wrong in "),
        (ValueError(), "without a message"),
        (torch.ones(2, 4, 5, 8, dtype=torch.float64), "returned torch.float64 for torch.float32"),
        (torch.ones(2, 4, 6, 8), "returned (2, 4, 6, 8) for (2, 4, 5, 8)"),
        (None, "raised nothing"),
    ],
    ids=["KeyError", "UnicodeError", "file", "message", "dtype", "shape", "accepted"],
)
def test_wrong_errors_and_results_are_reported(
    outcome: object, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a replaced `attention`, which raises or returns the outcome."""

    def attention(**arguments: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    replaced = dataclasses.replace(FUNCTIONS["attention"], call=attention)
    monkeypatch.setitem(FUNCTIONS, "attention", replaced)
    value = "nan" if outcome is None else "0.5"
    with pytest.raises(AssertionError) as failure:
        Hostile(function="attention", argument="scale", value=value).check()
    assert report in str(failure.value)
