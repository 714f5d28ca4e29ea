"""Bits of a row and what they depend on (docs/reliability.md), compared by torch.equal; and
dropout bits of the parts of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

import transformer_kernels as tk
from tests.fuzz.valid.bits import CHANGES, Bits, Kind, Others, promised, promised_others
from tests.support import emulator
from tests.support.backends import ISAS, NAMES, dtypes_of, forced_isa
from tests.support.dropout_parts import HOPPER, PARTS, Part, assert_part, assert_undivided_bits
from tests.support.runtime import threads

emulated = pytest.mark.skipif("cuda" not in NAMES, reason="the CUDA kernels are not emulated")
SMALL: dict[str, Any] = {"B": 2, "H_kv": 2, "group": 2, "D": 16, "D_v": 8}


@pytest.mark.quick
@pytest.mark.parametrize(("change", "backend"), [(c, n) for n in NAMES for c in promised(n)])
def test_promise(change: str, backend: str) -> None:
    M, N = (5, 19) if backend == "triton" else (35, 69)
    Bits(change=change, backend=backend, **SMALL, M=M, N=N, mask="causal").check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("isa", ISAS)
def test_promises_of_each_instruction_set(dtype: str, isa: str) -> None:
    """Rows of width 32 are read in place, if they are contiguous."""
    sizes = {**SMALL, "D": 32, "D_v": 32, "N": 133, "threads": 3}
    kinds: tuple[tuple[int, Kind], ...] = (
        (3, "window"),
        (24, "none"),
        (67, "padding"),
        (131, "dense"),
    )
    with forced_isa(isa):
        for change in promised("cpu"):
            for M, mask in kinds:
                Bits(change=change, dtype=dtype, **sizes, M=M, mask=mask).check()


@pytest.mark.parametrize("others", promised_others("cpu"))
@pytest.mark.parametrize("M", [1, 24, 25])
def test_values_of_other_batch_entries(others: Others, M: int) -> None:
    """The decoding kernel repeats heads with a large lse by the packed one: these heads alone."""
    sizes = {**SMALL, "M": M, "N": 65}
    Bits(change="others", others=others, **sizes, mask="padding").check()


@pytest.mark.parametrize("count", [1, 3])
def test_large_scores_of_another_head_of_a_group(count: int) -> None:
    q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 1, 131, 16), torch.randn(1, 1, 131, 16)
    louder = torch.cat([q[:, :1], q[:, 1:2] * 1000, q[:, 2:]], dim=1)
    with threads(count):
        quiet, loud = (tk.attention(x, k, v, return_lse=True, backend="cpu") for x in (q, louder))
    assert float(loud[1][:, 1].min()) > 128
    for before, after in zip(quiet, loud, strict=True):
        for h in (0, 2, 3):
            assert torch.equal(before[:, h], after[:, h])


@pytest.mark.parametrize("threads_before", [1, 2, 3])
def test_dq_with_two_key_heads_a_thread(threads_before: int) -> None:
    """Twice as many key heads in the batch as threads: the keys are not split."""
    call = Bits(change="repeat", B=3, H_kv=2, group=2, M=70, N=200, D=16, D_v=16)
    x = call.example()
    with threads(1):
        expected = call.run(x)["dq"]
    with threads(threads_before):
        assert torch.equal(call.run(x)["dq"], expected)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_a_short_call(isa: str) -> None:
    """At most 4 queries: every instruction set and dtype uses the decoding kernel."""
    with forced_isa(isa):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            q, k, v = (torch.randn(2, 4, n, 24).to(dtype) for n in (4, 600, 600))
            o, lse = tk.attention(q, k, v, return_lse=True, backend="cpu")
            for i in range(4):
                row = tk.attention(q[:, :, i : i + 1], k, v, return_lse=True, backend="cpu")
                assert torch.equal(o[:, :, i : i + 1], row[0])
                assert torch.equal(lse[:, :, i : i + 1], row[1])


def sequences(M: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and caches of three sequences of different lengths; the rest of the caches is NaN."""
    q, k, v = (torch.randn(3, H, n, 24) for H, n in ((6, M), (2, 700), (2, 700)))
    lengths = torch.tensor([700, 33, 520], dtype=torch.int32)
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = v[b, :, length:] = math.nan
    return q, k, v, lengths


@pytest.mark.parametrize("M", [1, 5, 25])
@pytest.mark.parametrize("isa", ISAS)
def test_decoding_one_sequence_of_a_batch(isa: str, M: int) -> None:
    """Alone, in a longer cache, on another number of threads, and one key head at a time."""
    q, k, v, lengths = sequences(M)
    with forced_isa(isa), threads(3):
        o, lse = decode(q, k, v, lengths)
        for b in range(3):
            for h in range(2):
                heads, one = slice(3 * h, 3 * h + 3), slice(b, b + 1)
                longer_k, longer_v = (
                    torch.nn.functional.pad(x[one, h : h + 1], (0, 0, 0, 77)) for x in (k, v)
                )
                with threads(1):
                    alone = decode(q[one, heads], longer_k, longer_v, lengths[one])
                assert torch.equal(o[one, heads], alone[0])
                assert torch.equal(lse[one, heads], alone[1])


def test_decoding_beside_large_scores() -> None:
    q, k, v, lengths = sequences(2)
    quiet = decode(q, k, v, lengths)
    q[1:] *= 1000
    loud = decode(q, k, v, lengths)
    assert float(loud[1].max()) > 128
    assert all(torch.equal(x[:1], y[:1]) for x, y in zip(quiet, loud, strict=True))


def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    return tk.attention_decode(q, k, v, lengths, return_lse=True, backend="cpu")


@pytest.mark.parametrize("count", [1, 3])
def test_packed_sequences_equal_sequences_alone(count: int) -> None:
    """Short sequences share the threads, long ones use all; the other sequences decide which."""
    cu = torch.tensor([0, 5, 150, 174, 175], dtype=torch.int32)
    q, k, v = torch.randn(175, 4, 24), torch.randn(175, 2, 24), torch.randn(175, 2, 24)
    q[5:150] *= 300
    q[:5, :2] *= 300
    with threads(count):
        packed = varlen(q, k, v, cu)
        for first, last in ((0, 5), (5, 150), (150, 174), (174, 175)):
            rows = slice(first, last)
            alone = varlen(q[rows], k[rows], v[rows], torch.tensor([0, last - first]))
            for x, y in zip(packed, alone, strict=True):
                assert torch.equal(x[rows], y)


def varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> list[Tensor]:
    """o, dk and dv."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    cu = cu.to(torch.int32)
    o = tk.attention_varlen(
        inputs[0], inputs[1], inputs[2], cu, cu, mask=tk.Mask.causal(), backend="cpu"
    )
    return [o.detach(), *torch.autograd.grad(o.sin().sum(), inputs)[1:]]


@emulated
@pytest.mark.parametrize("change", [name for name, who in CHANGES.items() if "cuda" in who])
@pytest.mark.parametrize(("M", "N"), [(35, 69), (130, 140)])
def test_promise_of_the_hopper_kernels(M: int, N: int, change: str) -> None:
    """Widths that are multiples of 8 are stored by TMA. Of four tiles of 128 queries and keys one
    is full, and is computed without mask tests."""
    with emulator.chip(90):
        Bits(change=change, backend="cuda", dtype="bfloat16", **SMALL, M=M, N=N).check()


# Parts of a call with dropout: the offsets of their rows, columns and heads.


def sampled(parts: Sequence[Part], name: str) -> list[ParameterSet]:
    """Returns test parameters; those but `name` are `exhaustive`."""
    return [
        pytest.param(part, id=part.name, marks=() if part.name == name else pytest.mark.exhaustive)
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


@emulated
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", sampled(HOPPER, "width-128"))
def test_part_on_hopper(part: Part) -> None:
    """Warps of the producer generate the bits of the backward pass, a query tile ahead."""
    with emulator.chip(90):
        assert_part(part, "cuda", torch.bfloat16)


@emulated
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", sampled(HOPPER[3:], "width-64"))
def test_part_on_ampere(part: Part) -> None:
    with emulator.chip(80):
        assert_part(part, "cuda", torch.bfloat16)


def test_parts_have_the_bits_of_the_undivided_call(backend: str) -> None:
    assert_undivided_bits(backend)
