"""The tables of fields, of attention and linear attention: equal in Python and C++, source of
schemas, packing and signatures."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import COMPILED_BACKENDS, NAMES, operators_of
from tests.support.linear import operators_of as linear_operators_of
from transformer_kernels import _C
from transformer_kernels.backends import schema
from transformer_kernels.backends.triton import operators as triton_operators
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.linear.attention import LINEAR, LINEAR_BACKENDS
from transformer_kernels.linear.backends import KernelBackend
from transformer_kernels.linear.delta.backends import DELTA_BACKENDS
from transformer_kernels.linear.family import BackwardCall
from transformer_kernels.linear.types import Cotangents, Inputs, Options, Saved
from transformer_kernels.masks.resolved import ALL_VISIBLE, ResolvedMask
from transformer_kernels.problem import Layout, Problem, shape_of, unpack
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.problem.fields import FIELDS
from transformer_kernels.scores.options import PLAIN_SCORES, ScoreArguments, ScoreOptions

Q = torch.randn(2, 4, 5, 8)
IDS = torch.zeros(2, 5, dtype=torch.int64)


def test_both_languages_have_the_same_table() -> None:
    """csrc/common/fields.h, linear_fields.h, and the annotations of the named tuples."""
    rows = tuple((f.name, f.kind, f.shape, f.layouts) for f in FIELDS)
    assert rows == _C.FIELDS
    rows = tuple((f.name, f.kind, f.shape, f.layouts) for f in LINEAR.fields)
    assert tuple(row for row in rows if row[1] != "Tensor") == _C.LINEAR_FIELDS  # not q, k and v


def test_operators_have_the_schema_of_the_table() -> None:
    for backend in COMPILED_BACKENDS:
        operators = operators_of(backend)
        assert str(operators.attention_forward.default._schema).endswith(schema.FORWARD)
        assert str(operators.attention_backward.default._schema).endswith(schema.BACKWARD)
    assert str(triton_operators.forward._schema).endswith(schema.FORWARD)
    assert str(triton_operators.backward._schema).endswith(schema.BACKWARD)


def test_fields_are_distinct_and_optional() -> None:
    assert len({field.name for field in FIELDS}) == len(FIELDS)
    q = torch.randn(1, 1, 3, 4)
    o, row_stats, _ = torch.ops.transformer_kernels.attention_forward(
        q, q, q, **{field.name: field.default for field in FIELDS}
    )
    expected = tk.attention(q, q, q, return_lse=True, backend="reference")
    assert_same_function((o, row_stats[0]), expected)


def problem() -> Problem:
    mask = tk.Mask.causal() & tk.Mask.segments(IDS) & tk.Mask.padding(torch.tensor([3, 5]))
    bias = torch.randn(5, 5)
    return dense_problem(Q, Q, Q, mask=mask, bias=bias, softcap=2.0, dropout_p=0.5, seed=1)


def same_fields(one: Iterable[object], other: Iterable[object]) -> bool:
    return all(x is y if isinstance(x, Tensor) else x == y for x, y in zip(one, other, strict=True))


def same(one: Problem, other: Problem) -> bool:
    return one.shape == other.shape and same_fields(one.pack(), other.pack())


def test_unpack_inverts_pack() -> None:
    one = problem()
    assert same(unpack(Q, Q, Q, one.pack()), one)
    layout = Layout(cache_seqlens=torch.tensor([3, 5]), block_table=torch.zeros(2, 3).int())
    cached = Problem(shape_of(Q, Q, Q, layout), ResolvedMask(), ScoreOptions(scale=0.5), layout)
    assert cached.shape.N == 15
    assert same(unpack(Q, Q, Q, cached.pack()), cached)


def test_tensors_can_be_taken_out_and_put_back() -> None:
    one = problem()
    tensors = one.tensors()
    assert set(tensors) == {"bias", "seed", "key_end", "q_low", "q_high", "k_position"}
    without = one.with_tensors(dict.fromkeys(tensors))
    assert without.tensors() == {}
    assert without.scores.softcap == 2.0
    assert same(without.with_tensors(tensors), one)


def test_operators_take_the_same_score_arguments() -> None:
    """An argument that is added to one operator is not forgotten in another."""
    wanted = set(ScoreArguments.__annotations__)
    for operator in (tk.attention, tk.attention_varlen):
        assert wanted <= set(inspect.signature(operator).parameters)
    decoding = set(inspect.signature(tk.attention_decode).parameters)
    assert wanted - decoding == {"dropout_p", "seed"}


def test_problems_without_options_share_the_defaults() -> None:
    """Code that compares with the defaults by identity skips work for them."""
    for problem in (dense_problem(Q, Q, Q), dense_problem(Q, Q, Q, softcap=None, dropout_p=0.0)):
        assert problem.scores is PLAIN_SCORES
        assert problem.mask is ALL_VISIBLE
    assert dense_problem(Q, Q, Q, scale=2).scores == ScoreOptions(scale=2.0)
    slopes = tk.alibi(torch.ones(4), align="bottom_right")
    assert dense_problem(Q, Q, Q, bias=slopes).mask == ALL_VISIBLE._replace(bottom_right=True)


LINEAR_KERNELS = {
    backend.name: backend
    for backend in LINEAR_BACKENDS
    if isinstance(backend, KernelBackend) and backend.name in NAMES
}
DELTA_KERNELS = [backend for backend in DELTA_BACKENDS if isinstance(backend, KernelBackend)]
LINEAR_OPTIONS = Options("relu", causal=False, normalize=False, eps=0.5)


def linear_inputs() -> Inputs:
    """A distinct tensor for every field."""
    return Inputs._make(torch.randn(1, 1, 3, 4) for _ in Inputs._fields)


@pytest.mark.parametrize("backend", [*LINEAR_KERNELS.values(), *DELTA_KERNELS])
def test_operators_of_a_family_have_its_schemas(backend: KernelBackend) -> None:
    found = linear_operators_of(backend)
    for operator, wanted in zip(found, backend.family.schemas, strict=True):
        assert str(operator._schema).partition("(")[2] == wanted.removeprefix("(")


def test_linear_unpack_inverts_pack() -> None:
    x = linear_inputs()
    got, options = LINEAR.unpack(LINEAR.pack(x, LINEAR_OPTIONS))
    assert same_fields(got, x)
    assert options == LINEAR_OPTIONS


def test_unpack_backward_inverts_pack_backward() -> None:
    x, (d_o, dS, dz, o, normalizer, *_) = linear_inputs(), linear_inputs()
    assert dS is not None
    assert o is not None
    assert normalizer is not None
    call = BackwardCall(Cotangents(d_o, dS, dz), Saved(o, normalizer), x, LINEAR_OPTIONS, (True,))
    got = LINEAR.unpack_backward(LINEAR.pack_backward(call))
    assert same_fields((*got.cotangents, *got.saved, *got.x), (d_o, dS, dz, o, normalizer, *x))
    assert got[3:] == (LINEAR_OPTIONS, (True,))


def test_steps_have_the_defaults_of_other_fields() -> None:
    x = linear_inputs()
    got, options = LINEAR.unpack_steps(LINEAR.pack_steps(x, LINEAR_OPTIONS))
    assert same_fields(got, x._replace(cu_seqlens=None, key_start=None, key_end=None))
    assert options == LINEAR_OPTIONS._replace(causal=True)


def test_other_arguments_than_those_of_the_table_are_refused() -> None:
    arguments = LINEAR.pack(linear_inputs(), LINEAR_OPTIONS)
    for wrong in (arguments[:-1], (*arguments, None)):
        with pytest.raises(TypeError, match="Expected"):
            LINEAR.unpack(wrong)


@pytest.mark.parametrize("name", [name for name in LINEAR_KERNELS if name != "triton"])
@pytest.mark.parametrize("field", [f.name for f in LINEAR.fields if "Tensor" in f.kind])
def test_compiled_linear_operators_check_every_tensor(name: str, field: str) -> None:
    """The shape of the table is the one that is read. Operators of Triton trust their arguments."""
    q, k, v = torch.randn(2, 2, 5, 4), torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 6)
    S, z, ends = torch.randn(2, 1, 4, 6), torch.rand(2, 1, 4), torch.tensor([3, 5])
    x = Inputs(q, k, v, -torch.rand(2, 1, 5), S, z, None, torch.zeros_like(ends), ends)
    forward, *_ = linear_operators_of(LINEAR_KERNELS[name])
    options = Options("elu", causal=True, normalize=True, eps=1e-6)
    o, _, *end = forward(*LINEAR.pack(x, options))
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
        forward(*LINEAR.pack(x._replace(**{field: wrong}), options))
    if given is not None:
        with pytest.raises(RuntimeError, match=r"wrong dtype|must be float16"):
            forward(*LINEAR.pack(x._replace(**{field: given.to(torch.int32)}), options))
