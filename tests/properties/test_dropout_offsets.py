"""Parts of a call with dropout: the offsets of their rows, columns and heads, in every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from tests.support.backends import COMPILED_BACKENDS, dtypes_of, operators_of
from tests.support.dropout_parts import HOPPER, PARTS, P, Part, assert_part, assert_undivided_bits
from tests.support.isas import ISAS, forced_isa
from tests.support.operators import operator_arguments


def sampled(parts: Sequence[Part], *names: str) -> list[ParameterSet]:
    """Returns test parameters; those without these names are `exhaustive`."""
    return [
        pytest.param(part, id=part.name, marks=() if part.name in names else pytest.mark.exhaustive)
        for part in parts
    ]


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", sampled(PARTS, "all"))
def test_part(part: Part, backend: str) -> None:
    assert_part(part, backend, torch.float32)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("part", sampled(PARTS[3:], "heads-in-a-tile"))
def test_part_with_each_instruction_set(part: Part, isa: str) -> None:
    with forced_isa(isa):
        for dtype in dtypes_of("cpu"):
            assert_part(part, "cpu", dtype)


@contextmanager
def emulated_chip(capability: int) -> Iterator[None]:
    if "cuda" not in COMPILED_BACKENDS:
        pytest.skip("the CUDA kernels are not emulated")
    from tests.support import emulator

    with emulator.chip(capability):
        yield


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", sampled(HOPPER, "width-128"))
def test_part_on_hopper(part: Part) -> None:
    """Warps of the producer generate the bits of the backward pass, a query tile ahead."""
    with emulated_chip(90):
        assert_part(part, "cuda", torch.bfloat16)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", sampled(HOPPER[3:], "width-64"))
def test_part_on_ampere(part: Part) -> None:
    with emulated_chip(80):
        assert_part(part, "cuda", torch.bfloat16)


def test_parts_have_the_bits_of_the_undivided_call(backend: str) -> None:
    assert_undivided_bits(backend)


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ({"dropout_column": 32}, "dropout_column must be a multiple of 64, got 32"),
        ({"dropout_column": -64}, r"dropout_column must be between 0 and 2\^31 - 1, got -64"),
        ({"dropout_row": -1}, r"dropout_row must be between 0 and 2\^31 - 1, got -1"),
        ({"dropout_head": 2**31}, "dropout_head must be between 0 and .*, got 2147483648"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_operators_refuse_other_offsets(offsets: dict[str, int], reason: str, backend: str) -> None:
    q = torch.randn(1, 1, 3, 8)
    arguments = operator_arguments(q, q, q, dropout_p=P, seed=torch.tensor(1), **offsets)
    with pytest.raises(RuntimeError, match=reason):
        operators_of(backend).attention_forward(**arguments)


@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_packed_sequences_have_no_offsets(backend: str) -> None:
    q, starts = torch.randn(1, 1, 3, 8), torch.tensor([0, 3], dtype=torch.int32)
    arguments = operator_arguments(
        q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=3, max_seqlen_k=3,
        dropout_row=1,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="dropout_row is not supported in a varlen call"):
        operators_of(backend).attention_forward(**arguments)
