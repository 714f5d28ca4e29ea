"""The table of fields: equal in Python and C++, source of schemas, packing and signatures."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import COMPILED_BACKENDS, operators_of
from transformer_kernels import _C
from transformer_kernels.backends import schema
from transformer_kernels.backends.triton import operators as triton_operators
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.resolved import ResolvedMask
from transformer_kernels.problem import Layout, Problem, shape_of, unpack
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.problem.fields import FIELDS
from transformer_kernels.scores.options import ScoreArguments, ScoreOptions

Q = torch.randn(2, 4, 5, 8)
IDS = torch.zeros(2, 5, dtype=torch.int64)


def test_both_languages_have_the_same_table() -> None:
    """csrc/common/fields.h and the annotations of the named tuples."""
    rows = tuple((f.name, f.kind, f.shape, f.layouts) for f in FIELDS)
    assert rows == _C.FIELDS


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


def same(one: Problem, other: Problem) -> bool:
    return one.shape == other.shape and all(
        x is y if isinstance(x, Tensor) else x == y
        for x, y in zip(one.pack(), other.pack(), strict=True)
    )


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
