"""The table of fields of linear attention: equal in Python and C++, source of the schemas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import NAMES
from tests.support.linear import operators_of
from transformer_kernels import _C
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.linear import operators
from transformer_kernels.linear.backends import LINEAR_BACKENDS
from transformer_kernels.linear.base import LinearBackend
from transformer_kernels.linear.types import BackwardCall, Cotangents, Inputs, Options, Saved

BACKENDS = {
    backend.name: backend
    for backend in LINEAR_BACKENDS
    if isinstance(backend, LinearBackend) and backend.name in NAMES
}
OPTIONS = Options("relu", causal=False, normalize=False, eps=0.5)


def inputs() -> Inputs:
    """A distinct tensor for every field."""
    return Inputs._make(torch.randn(1, 1, 3, 4) for _ in Inputs._fields)


def same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(x is y if isinstance(x, Tensor) else x == y for x, y in zip(one, other, strict=True))


def test_both_languages_have_the_same_table() -> None:
    """csrc/common/linear_fields.h and the annotations of the named tuples; q, k and v aside."""
    rows = [(f.name, f.kind, f.shape, f.layouts) for f in operators.FIELDS if f.kind != "Tensor"]
    assert tuple(rows) == _C.LINEAR_FIELDS


@pytest.mark.parametrize("name", BACKENDS)
def test_operators_have_the_schemas_of_the_table(name: str) -> None:
    schemas = operators.FORWARD, operators.BACKWARD, operators.STEPS
    for operator, schema in zip(operators_of(BACKENDS[name]), schemas, strict=True):
        assert str(operator._schema).partition("(")[2] == schema.removeprefix("(")


def test_unpack_inverts_pack() -> None:
    x = inputs()
    got, options = operators.unpack(operators.pack(x, OPTIONS))
    assert same(got, x)
    assert options == OPTIONS


def test_unpack_backward_inverts_pack_backward() -> None:
    x, (d_o, dS, dz, o, normalizer, *_) = inputs(), inputs()
    assert dS is not None
    assert o is not None
    assert normalizer is not None
    call = BackwardCall(Cotangents(d_o, dS, dz), Saved(o, normalizer), x, OPTIONS, True)
    got = operators.unpack_backward(operators.pack_backward(call))
    assert same((*got.cotangents, *got.saved, *got.x), (d_o, dS, dz, o, normalizer, *x))
    assert got[3:] == (OPTIONS, True)


def test_steps_have_the_defaults_of_other_fields() -> None:
    x = inputs()
    got, options = operators.unpack_steps(operators.pack_steps(x, OPTIONS))
    assert same(got, x._replace(cu_seqlens=None, key_start=None, key_end=None))
    assert options == OPTIONS._replace(causal=True)


def test_other_arguments_than_those_of_the_table_are_refused() -> None:
    arguments = operators.pack(inputs(), OPTIONS)
    for wrong in (arguments[:-1], (*arguments, None)):
        with pytest.raises(TypeError, match="Expected"):
            operators.unpack(wrong)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "triton"])
@pytest.mark.parametrize("field", [f.name for f in operators.FIELDS if "Tensor" in f.kind])
def test_compiled_operators_check_every_tensor(name: str, field: str) -> None:
    """The shape of the table is the one that is read. Operators of Triton trust their arguments."""
    q, k, v = torch.randn(2, 2, 5, 4), torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 6)
    S, z, ends = torch.randn(2, 1, 4, 6), torch.rand(2, 1, 4), torch.tensor([3, 5])
    x = Inputs(q, k, v, -torch.rand(2, 1, 5), S, z, None, torch.zeros_like(ends), ends)
    forward, *_ = operators_of(BACKENDS[name])
    options = Options("elu", causal=True, normalize=True, eps=1e-6)
    o, _, *end = forward(*operators.pack(x, options))
    mask = tk.Mask.padding(ends)
    state = tk.LinearState(S, z)
    expected, expected_end = tk.linear_attention(
        q, k, v, log_decay=x.log_decay, initial_state=state, mask=mask, return_state=True,
        backend="reference",
    )  # fmt: skip
    assert_same_function((o, *end), (expected, *expected_end))
    given = getattr(x, field)
    wrong = torch.zeros(4) if given is None else given[..., None]
    with pytest.raises(RuntimeError, match=r"wrong shape|four dimensions|packed sequences"):
        forward(*operators.pack(x._replace(**{field: wrong}), options))
    if given is not None:
        with pytest.raises(RuntimeError, match=r"wrong dtype|must be float16"):
            forward(*operators.pack(x._replace(**{field: given.to(torch.int32)}), options))
