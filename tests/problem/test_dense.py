"""Invalid `attention` calls: errors name the argument, its value and what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.tiers import each
from transformer_kernels.masks.resolved import ALL_VISIBLE
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.scores.options import PLAIN_SCORES, ScoreOptions

B, H_q, H_kv, M, N, D = 2, 4, 2, 3, 5, 8


def call(**changes: Any) -> Any:
    """A valid call with the given changes."""
    arguments: dict[str, Any] = {
        "q": torch.randn(B, H_q, M, D),
        "k": torch.randn(B, H_kv, N, D),
        "v": torch.randn(B, H_kv, N, D),
    }
    return tk.attention(**arguments | changes)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


TENSORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q-list": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "k-none": ({"k": None}, TypeError, "k must be a tensor, got NoneType"),
    "q-3d": ({"q": torch.randn(4, 3, 8)}, ValueError, r"q must be \(batch, .* \(4, 3, 8\)"),
    "v-5d": ({"v": torch.randn(1, 2, 2, 5, 8)}, ValueError, r"v must be .* \(1, 2, 2, 5, 8\)"),
    "integers": (
        {"q": torch.ones(B, H_q, M, D, dtype=torch.int64)}, TypeError, "q must be .*torch.int64",
    ),
    "complex": ({"k": torch.randn(B, H_kv, N, D) + 0j}, TypeError, "k must be .*torch.complex64"),
    "dtypes": (
        {"v": torch.randn(B, H_kv, N, D).half()}, TypeError, "v torch.float16, q torch.float32",
    ),
    "devices": ({"k": meta(B, H_kv, N, D)}, ValueError, "k on meta, q on cpu"),
    "batch": ({"k": torch.randn(1, H_kv, N, D)}, ValueError, r"batch size, got .*k \(1, 2, 5, 8\)"),
    "heads": ({"q": torch.randn(B, 3, M, D)}, ValueError, r"multiple of k's, got q \(2, 3, 3, 8\)"),
    "no-heads": ({"q": torch.randn(B, 0, M, D)}, ValueError, "positive multiple"),
    "v-heads": ({"v": torch.randn(B, 1, N, D)}, ValueError, "k and v must share heads and length"),
    "v-length": ({"v": torch.randn(B, H_kv, 4, D)}, ValueError, "k and v must share heads and len"),
    "width": ({"k": torch.randn(B, H_kv, N, 7)}, ValueError, "q and k must share the width D"),
    "no-width": (
        {"q": torch.randn(B, H_q, M, 0), "k": torch.randn(B, H_kv, N, 0)},
        ValueError, "D and D_v must be at least 1",
    ),
    "sparse": ({"q": torch.ones(B, H_q, M, D).to_sparse()}, TypeError, "layout torch.sparse_coo"),
}  # fmt: skip

NUMBERS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scale-string": ({"scale": "1"}, TypeError, "scale must be a number, got '1'"),
    "scale-list": ({"scale": [1.0]}, TypeError, "scale must be a number"),
    "scale-nan": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "softcap-zero": ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0"),
    "softcap-negative": ({"softcap": -1}, ValueError, "softcap must be positive, got -1"),
    "softcap-inf": ({"softcap": float("inf")}, ValueError, "softcap must be finite, got inf"),
    "dropout-bool": ({"dropout_p": True}, TypeError, "dropout_p must be a number, got True"),
    "dropout-low": ({"dropout_p": -0.1}, ValueError, "between 0 and 1, got -0.1"),
    "dropout-high": ({"dropout_p": 1.1}, ValueError, "between 0 and 1, got 1.1"),
    "dropout-nan": ({"dropout_p": float("nan")}, ValueError, "dropout_p must be finite, got nan"),
    "seed-float": ({"seed": 1.5}, TypeError, "seed must be an int or an int64 scalar .* got 1.5"),
    "seed-large": (
        {"seed": 1 << 63},
        ValueError,
        "seed must be at most 9223372036854775807, got 9223372036854775808",
    ),
    "seed-vector": ({"seed": torch.ones(2).long()}, TypeError, r"seed must be .* \(2,\)"),
    "seed-float-tensor": ({"seed": torch.tensor(1.0)}, TypeError, "seed must be .* torch.float32"),
    "seed-device": ({"seed": meta(dtype=torch.int64)}, ValueError, "seed is on meta, q is on cpu"),
    "backend": ({"backend": "gpu"}, ValueError, "backend must be one of 'auto', .*, got 'gpu'"),
    "backend-none": ({"backend": None}, ValueError, "backend must be one of 'auto', .*, got None"),
}

BIASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": (
        {"bias": [0.0]},
        TypeError,
        r"bias must be a tensor, alibi\(slopes\) or None, got \[0.0\]",
    ),
    "bool": ({"bias": torch.ones(M, N).bool()}, TypeError, "bias must be .*got torch.bool"),
    "double": ({"bias": torch.ones(M, N).double()}, TypeError, "bias must be .*got torch.float64"),
    "half": ({"bias": torch.ones(M, N).half()}, TypeError, "bias must be .*got torch.float16"),
    "shape": ({"bias": torch.ones(N, M)}, ValueError, r"= \(2, 4, 3, 5\), got \(1, 1, 5, 3\)"),
    "heads": (
        {"bias": torch.ones(H_kv, M, N)},
        ValueError,
        r"bias must broadcast to .*\(1, 2, 3, 5\)",
    ),
    "5d": ({"bias": torch.ones(1, 1, 1, M, N)}, ValueError, "bias must broadcast to"),
    "device": ({"bias": meta(M, N)}, ValueError, "bias is on meta, q is on cpu"),
    "slopes": (
        {"bias": tk.alibi(torch.ones(3))},
        ValueError,
        r"slopes must be \(H_q,\) = \(4,\) or \(B, H_q\) = \(2, 4\), got \(3,\)",
    ),
    "slopes-device": ({"bias": tk.alibi(meta(4))}, ValueError, "slopes are on meta, q is on cpu"),
    "sinks-list": ({"sinks": [0.0] * 4}, TypeError, "sinks must be a floating-point tensor, got"),
    "sinks-integers": (
        {"sinks": torch.ones(4).long()},
        TypeError,
        "sinks must be a floating-point",
    ),
    "sinks-shape": ({"sinks": torch.ones(4, 1)}, ValueError, r"= \(4,\), got \(4, 1\)"),
    "sinks-device": ({"sinks": meta(4)}, ValueError, "sinks is on meta, q is on cpu"),
}

MASKS: dict[str, tuple[Any, type[Exception], str]] = {
    "tensor": (torch.ones(M, N).bool(), TypeError, "mask must be a Mask or None, got Tensor; wrap"),
    "padding": (tk.Mask.padding(torch.tensor([1])), ValueError, r"\(batch,\) = \(2,\), got \(1,\)"),
    "range": (
        tk.Mask.key_range(torch.tensor([1, 1]), torch.tensor([2])), ValueError, r"end .*\(1,\)",
    ),
    "segments": (
        tk.Mask.segments(torch.ones(B, M).long()), ValueError, r"k_ids .*\(2, 5\), got \(2, 3\)",
    ),
    "segments-of-one-batch-entry": (
        tk.Mask.segments(torch.ones(1, M).long(), torch.ones(1, N).long()),
        ValueError, r"q_ids .*\(2, 3\), got \(1, 3\)",
    ),
    "positions": (
        tk.Mask.positions(torch.ones(1, M).long(), torch.ones(3, N).long()),
        ValueError, r"k_pos .*\(2 or 1, 4 or 1, 5\), got \(3, 5\)",
    ),
    "positions-heads": (
        tk.Mask.positions(torch.ones(1, 2, M).long(), torch.ones(1, N).long()),
        ValueError, r"q_pos .*\(2 or 1, 4 or 1, 3\), got \(1, 2, 3\)",
    ),
    "dense": (tk.Mask.dense(torch.ones(N, M).bool()), ValueError, r"dense .*\(1, 1, 5, 3\)"),
    "dense-device": (tk.Mask.dense(meta(M, N).bool()), ValueError, "Dense.attn_mask is on meta"),
    "layout": (
        tk.Mask.block_sparse(torch.ones(2, 2).bool(), 2), ValueError, r"\(4 or 1, 2, 3\).*2, 2",
    ),
    "layout-heads": (
        tk.Mask.block_sparse(torch.ones(2, 2, 3).bool(), 2), ValueError, r"\(4 or 1, .*\(2, 2, 3\)",
    ),
}  # fmt: skip


@each(
    ("changes", "error", "message"),
    [
        pytest.param(*row, id=name)
        for name, row in (TENSORS | NUMBERS | {f"bias-{n}": r for n, r in BIASES.items()}).items()
    ],
)
def test_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


@each(("mask", "error", "message"), MASKS.values(), ids=MASKS)
def test_masks_of_wrong_sizes_raise(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(mask=mask)


Mask: Any = tk.Mask  # untyped: these calls are wrong on purpose
alibi: Any = tk.alibi
ONES = torch.ones(2, 2, dtype=torch.bool)

MAKERS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Mask.window(1.5, 0), TypeError, "left must be an int or None, got 1.5"),
    (lambda: Mask.window(0, True), TypeError, "right must be an int or None, got True"),
    (lambda: Mask.window(align="left"), ValueError, "'top_left' or 'bottom_right', got 'left'"),
    (lambda: Mask.causal(align=None), ValueError, r"align must be .* got None"),
    (lambda: Mask.padding(torch.ones(2)), TypeError, r"key_lengths must be .*torch.float32"),
    (lambda: Mask.padding([1, 2]), TypeError, "key_lengths must be a tensor .* got list"),
    (lambda: Mask.padding(ONES.long()), ValueError, r"key_lengths must be .* shape \(2, 2\)"),
    (lambda: Mask.padding(ONES[0]), TypeError, r"key_lengths must be .*torch.bool"),
    (lambda: Mask.key_range(ONES[0], ONES[0].long()), TypeError, "start must be a tensor of int"),
    (lambda: Mask.segments(torch.ones(2, 3)), TypeError, r"q_ids must be .*torch.float32"),
    (lambda: Mask.segments(ONES[0].long()), ValueError, r"q_ids must be .*shape \(2,\)"),
    (lambda: Mask.segments(ONES.long(), equal=1), TypeError, "equal must be True or False, got 1"),
    (lambda: Mask.positions(ONES, ONES.long()), TypeError, r"q_pos must be .*torch.bool"),
    (lambda: Mask.positions(ONES.long(), ONES[0].long()), ValueError, r"k_pos .*shape \(2,\)"),
    (lambda: Mask.positions(ONES.long(), ONES.long(), 0.5), TypeError, "left must be an int or"),
    (lambda: Mask.dense(torch.ones(3, 3)), TypeError, r"bool tensor, got .*torch.float32"),
    (lambda: Mask.dense(None), TypeError, "bool tensor, got NoneType"),
    (lambda: Mask.dense(ONES[None, None, None]), ValueError, r"got shape \(1, 1, 1, 2, 2\)"),
    (lambda: Mask.block_sparse(torch.ones(2, 2), 4), TypeError, "blocks must be a bool tensor"),
    (lambda: Mask.block_sparse(ONES[0], 4), ValueError, r"blocks must be .* shape \(2,\)"),
    (lambda: Mask.block_sparse(ONES, 0), ValueError, "block_size must be at least 1, got 0"),
    (lambda: Mask.block_sparse(ONES, 2.0), TypeError, "block_size must be an int, got 2.0"),
    (lambda: alibi([0.5]), TypeError, "slopes must be a floating-point tensor, got list"),
    (lambda: alibi(ONES[0].long()), TypeError, "slopes must be a floating-point tensor"),
    (lambda: alibi(torch.ones(1, 2, 2)), ValueError, r"\(H_q,\) or \(B, H_q\), got shape \(1, 2, "),
    (lambda: alibi(torch.tensor(1.0)), ValueError, r"\(H_q,\) or \(B, H_q\), got shape \(\)"),
    (lambda: alibi(torch.ones(2), align="right"), ValueError, "align must be .*got 'right'"),
    (lambda: tk.alibi_slopes(0), ValueError, "heads must be at least 1, got 0"),
]


@each(("make", "error", "message"), MAKERS)
def test_invalid_mask_and_bias_constructors_raise(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_explain_raises_the_same_errors() -> None:
    x = torch.randn(1, 1, 2, 2)
    with pytest.raises(ValueError, match="softcap must be positive"):
        tk.explain(x, x, x, softcap=0.0)
    with pytest.raises(ValueError, match="backend must be one of"):
        tk.explain(x, x, x, backend="gpu")


def test_problems_without_options_share_the_defaults() -> None:
    """Code that compares with the defaults by identity skips work for them."""
    q, k = torch.randn(B, H_q, M, D), torch.randn(B, H_kv, N, D)
    for problem in (dense_problem(q, k, k), dense_problem(q, k, k, softcap=None, dropout_p=0.0)):
        assert problem.scores is PLAIN_SCORES
        assert problem.mask is ALL_VISIBLE
    assert dense_problem(q, k, k, scale=2).scores == ScoreOptions(scale=2.0)
    slopes = tk.alibi(torch.ones(H_q), align="bottom_right")
    assert dense_problem(q, k, k, bias=slopes).mask == ALL_VISIBLE._replace(bottom_right=True)
