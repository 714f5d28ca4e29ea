"""Signatures of the operators: overloads name the options of the implementation; `mypy` checks the
types of the results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, assert_type, get_overloads, get_type_hints

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from transformer_kernels import distributed

OPERATORS = (
    tk.attention,
    tk.attention_decode,
    tk.attention_varlen,
    tk.linear_attention,
    tk.linear_attention_varlen,
    distributed.ring_attention,
    distributed.all_to_all_attention,
    distributed.ring_attention_varlen,
)


def parameters(function: Callable[..., Any]) -> dict[str, object]:
    """Types of the parameters by name, those of unpacked options included."""
    hints = get_type_hints(function)
    hints.pop("return")
    options = hints.pop("options", None)
    return hints | (get_type_hints(options.__args__[0]) if options is not None else {})


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda x: x.__name__)
def test_overloads_have_the_parameters_of_the_implementation(operator: Callable[..., Any]) -> None:
    want = parameters(operator)
    (flag,) = (name for name in want if name.startswith("return_"))
    overloads = get_overloads(operator)
    assert len(overloads) == 3
    for one in overloads:
        assert parameters(one) | {flag: bool} == want
        defaults = inspect.signature(operator).parameters
        for name, parameter in inspect.signature(one).parameters.items():
            if parameter.default is not parameter.empty:
                assert parameter.default == defaults[name].default


@pytest.mark.parametrize("flag", [False, True])
def test_a_flag_may_be_a_variable(flag: bool) -> None:
    x, packed, ends = torch.randn(1, 2, 3, 4), torch.randn(3, 2, 4), torch.tensor([0, 3])
    lengths = torch.tensor([3])
    either = tk.attention(x, x, x, return_lse=flag)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert_type(tk.attention(x, x, x), Tensor)
    assert_type(tk.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    results = [
        either,
        tk.attention_decode(x, x, x, lengths, return_lse=flag),
        tk.attention_varlen(packed, packed, packed, ends, return_lse=flag),
        tk.linear_attention(x, x, x, return_state=flag),
        tk.linear_attention_varlen(packed, packed, packed, ends, return_state=flag),
    ]
    assert [isinstance(x, tuple) for x in results] == [flag] * 5
