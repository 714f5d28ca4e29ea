"""Bad arguments: a ValueError or TypeError that names the argument, never torch's own error."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_kernels as tk
from tests.hostile import bad_arguments, bad_constructors
from tests.hostile.bad_arguments import DENSE, HUGE, B, D, H_kv, M, N, Row
from tests.support.backends import operators_of
from tests.support.operators import operator_arguments
from tests.support.runtime import freed, freed_view
from tests.support.tiers import each
from transformer_kernels.common.argument_checks import check_int, check_number, shown
from transformer_kernels.common.storage import are_plainly_stored, check_storage

VALID = {**bad_arguments.VALID, **bad_constructors.VALID}
ROWS = {**bad_arguments.ROWS, **bad_constructors.ROWS}
EXPLAINED = (
    tk.attention, tk.attention_varlen, tk.attention_decode,
    tk.linear_attention, tk.linear_attention_varlen, tk.linear_attention_decode,
    tk.gated_delta_rule, tk.gated_delta_rule_varlen, tk.gated_delta_rule_step,
    tk.causal_conv1d, tk.causal_conv1d_step,
)  # fmt: skip
"""Operators of `explain`, which raises their errors."""


@each("name", VALID)
def test_unchanged_arguments_are_valid(name: str) -> None:
    function, valid = VALID[name]
    function(**valid)


@pytest.mark.quick
@each(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{name}: {row.message}")
        for name, rows in ROWS.items()
        for row in rows
    ],
)
def test_bad_arguments(name: str, row: Row) -> None:
    function, valid = VALID[name]
    arguments = valid | row.changes
    calls: list[Callable[[], object]] = [partial(function, **arguments)]
    if function in EXPLAINED:
        bound = inspect.signature(function).bind(**arguments).arguments
        q, k, v = (bound.pop(name) for name in list(bound)[:3])
        calls.append(partial(tk.explain, q, k, v, operator=function, **bound))
    message = re.escape(row.message).replace(re.escape("..."), ".*")
    for call in calls:
        with pytest.raises(row.error, match=message):
            call()


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x) if x.dim() else [x])


KINDS: dict[str, Callable[[Tensor], object]] = {
    "nested": nested,
    "sparse": torch.Tensor.to_sparse,
    "csr": lambda x: x.reshape(-1, x.shape[-1] if x.dim() else 1).to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "complex": lambda x: x.to(torch.complex64),
    "list": lambda x: [x],
    "array": lambda x: x.numpy(),
    "none-like": lambda x: NotImplemented,
}


@each("name", VALID)
def test_tensors_of_another_kind(name: str) -> None:
    function, valid = VALID[name]
    for argument, x in valid.items():
        for make in KINDS.values() if isinstance(x, Tensor) else ():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about its prototypes
                wrong = make(x)
            with pytest.raises(TypeError, match=f"^{argument} must be "):
                function(**valid | {argument: wrong})


@each("name", DENSE)
def test_autocast_does_not_cast_tensors_of_another_kind(name: str) -> None:
    wrong = torch.rand(B, H_kv, N, D).to_mkldnn()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=f"^{name} must be a strided tensor, got layout"),
    ):
        tk.attention(*(DENSE | {name: wrong}).values())


def test_result_too_large_to_allocate() -> None:
    q, v = torch.rand(1, 1, M, 1), torch.rand(1, 1, 1, 1)
    for size in (1 << 45, 1 << 61):
        wide = v.expand(1, 1, 1, size)
        for x in (q, q.expand(1, 2, M, 1), torch.rand(1, M, 2, 1).transpose(1, 2)):
            arguments = operator_arguments(x, v, wide)
            with pytest.raises(RuntimeError, match="cannot allocate memory for a result"):
                operators_of("cpu").attention_forward(**arguments)


def test_values_are_shown_shortly() -> None:
    assert shown(10**5000) == "an int of 16610 bits"
    assert shown(torch.ones(2, 3)) == "a tensor (2, 3)"
    assert len(shown([[["x" * 1000] * 100] * 100] * 100)) <= 100
    assert shown(-5) == "-5"


@each("value", [True, 1.0, "1", None, torch.tensor(1)])
def test_check_int_takes_ints_only(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^n must be an int, got"):
        check_int("n", value)


@each(
    ("value", "error"),
    [(HUGE, ValueError), (math.nan, ValueError), (1j, TypeError), (True, TypeError)],
)
def test_check_number_takes_finite_numbers_only(value: Any, error: type[Exception]) -> None:
    assert check_number("x", 1e-320) == 1e-320
    with pytest.raises(error, match=r"^x must"):
        check_number("x", value)


@each("free", [freed, freed_view])
def test_check_storage_names_the_freed_tensor(free: Callable[[Tensor], Tensor]) -> None:
    x = free(torch.ones(2, 3))
    for given in (x, nn.Parameter(x)):
        with pytest.raises(ValueError, match=r"k has the shape \(2, 3\), but its storage is freed"):
            check_storage((("q", torch.ones(1)), ("k", given)))


class Subclass(Tensor):
    """A subclass, which may have no storage of its own."""


def test_check_storage_accepts_everything_else() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    accepted = (
        None, 1.5, torch.ones(3), torch.ones(0), torch.ones(3, 0)[1:], torch.ones(3, device="meta"),
        torch.ones(2, 2).to_sparse(), torch._efficientzerotensor((2,)), fake,
        torch.ones(3).as_subclass(Subclass), freed(torch.ones(3))[:0],
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    )  # fmt: skip
    check_storage((str(n), x) for n, x in enumerate(accepted))


def test_check_storage_is_silent_under_transforms_and_compilers() -> None:
    def call(x: Tensor) -> Tensor:
        check_storage((("x", x),))
        return x * 2

    x = torch.ones(2, 3)
    assert torch.equal(torch.func.vmap(call)(x), x * 2)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x), x * 2)


def test_tensors_on_different_devices_are_not_plain() -> None:
    class OnAnotherDevice:
        """Attributes of a valid tensor on a GPU."""

        device, dtype, is_nested = torch.device("cuda", 1), torch.float32, False

        def data_ptr(self) -> int:
            return 1 << 45

    x, y = torch.ones(2), cast(Tensor, OnAnotherDevice())
    assert are_plainly_stored(x, x, x)
    assert not are_plainly_stored(x, y, x)
    assert not are_plainly_stored(x, x, y)
