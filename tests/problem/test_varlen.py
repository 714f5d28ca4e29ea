"""Invalid `attention_varlen` calls: errors name the argument, its value and what is expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.tiers import each

LENGTHS = (5, 0, 70, 33)
STARTS = torch.tensor([0, 5, 5, 75, 108])
TOTAL, H, D = 108, 2, 16
Options = dict[str, Any]


def starts_of(*values: int) -> Tensor:
    return torch.tensor(values)


ERRORS: dict[str, tuple[Options, type[Exception], str]] = {
    "q-list": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "q-4d": (
        {"q": torch.randn(1, TOTAL, H, D)},
        ValueError,
        r"q must be \(length, heads, width\), got shape \(1, 108, 2, 16\)",
    ),
    "k-integers": ({"k": torch.ones(TOTAL, H, D).long()}, TypeError, "k must be .*torch.int64"),
    "heads": (
        {"k": torch.randn(TOTAL, 3, D), "v": torch.randn(TOTAL, 3, D)},
        ValueError,
        r"multiple of k's, got q \(108, 2, 16\), k \(108, 3, 16\)",
    ),
    "v-length": ({"v": torch.randn(9, H, D)}, ValueError, "k and v must share heads and length"),
    "width": ({"k": torch.randn(TOTAL, H, 9)}, ValueError, "q and k must share the width D"),
    "list": ({"cu_seqlens_q": [0, 108]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
    "float": (
        {"cu_seqlens_q": STARTS.float()},
        TypeError,
        "cu_seqlens_q must be int32 or int64, got torch.float32",
    ),
    "k-int16": ({"cu_seqlens_k": STARTS.short()}, TypeError, "cu_seqlens_k must be .*torch.int16"),
    "2d": (
        {"cu_seqlens_q": STARTS[None]},
        ValueError,
        r"cu_seqlens_q must be \(B \+ 1,\), got shape \(1, 5\)",
    ),
    "empty": ({"cu_seqlens_k": STARTS[:0]}, ValueError, r"cu_seqlens_k must be .* shape \(0,\)"),
    "device": (
        {"cu_seqlens_q": STARTS.to("meta")},
        ValueError,
        "cu_seqlens_q is on meta, q is on cpu",
    ),
    "counts": (
        {"cu_seqlens_k": STARTS[:3]},
        ValueError,
        r"cu_seqlens_q and cu_seqlens_k must have the same shape, got \(5,\) and \(3,\)",
    ),
    "start": ({"cu_seqlens_q": starts_of(1, 9)}, ValueError, "cu_seqlens_q must start at 0, got 1"),
    "falls": (
        {"cu_seqlens_q": starts_of(0, 9, 8)},
        ValueError,
        "cu_seqlens_q must not decrease, got 9, then 8 at 2",
    ),
    "long": (
        {"cu_seqlens_q": starts_of(0, 109)},
        ValueError,
        "cu_seqlens_q must end within the 108 rows of q, got 109",
    ),
    "k-long": (
        {"k": torch.randn(9, H, D), "v": torch.randn(9, H, D)},
        ValueError,
        "cu_seqlens_k must end within the 9 rows of k, got 108",
    ),
    "max": (
        {"max_seqlen_q": 69},
        ValueError,
        "max_seqlen_q must be at least 70, the longest length in cu_seqlens_q, got 69",
    ),
    "max-k": ({"max_seqlen_k": 3}, ValueError, "max_seqlen_k must be at least 70"),
    "max-negative": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
    "max-float": ({"max_seqlen_q": 9.0}, TypeError, "max_seqlen_q must be an int or None, got 9.0"),
    "max-bool": ({"max_seqlen_k": True}, TypeError, "max_seqlen_k must be an int .* got True"),
    "mask-tensor": (
        {"mask": torch.ones(3, 3).bool()},
        TypeError,
        "mask must be a Mask or None, got Tensor",
    ),
    "mask-padding": (
        {"mask": tk.Mask.causal() & tk.Mask.padding(torch.tensor(LENGTHS))},
        ValueError,
        "mask may combine only Mask.window and Mask.causal for packed sequences, got .*KeyRange",
    ),
    "mask-dense": (
        {"mask": tk.Mask.dense(torch.ones(3, 3).bool())},
        ValueError,
        "mask may combine only Mask.window and Mask.causal for packed sequences, got .*Dense",
    ),
    "mask-aligns": (
        {"mask": tk.Mask.causal() & tk.Mask.window(3, align="bottom_right")},
        ValueError,
        "mask must have a single align for packed sequences, got both",
    ),
    "bias-tensor": (
        {"bias": torch.zeros(3, 3)},
        ValueError,
        r"bias must be alibi\(slopes\) or None for packed sequences, got a tensor \(3, 3\)",
    ),
    "bias-list": ({"bias": [0.0]}, TypeError, r"bias must be .*, got \[0.0\]"),
    "bias-slopes": (
        {"bias": tk.alibi(torch.ones(1, 2))},
        ValueError,
        r"= \(2,\) or \(B, H_q\) = \(\d, 2\), got \(1, 2\)",
    ),
    "bias-align": (
        {"mask": tk.Mask.causal(), "bias": tk.alibi(torch.ones(H), align="bottom_right")},
        ValueError,
        "mask and bias must have the same align .*, got 'top_left' and 'bottom_right'",
    ),
    "sinks": ({"sinks": torch.ones(3)}, ValueError, r"sinks must be \(H_q,\) = \(2,\), got \(3,\)"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0"),
    "dropout": ({"dropout_p": 1.1}, ValueError, "dropout_p must be between 0 and 1, got 1.1"),
    "seed": ({"seed": 1.5}, TypeError, "seed must be an int or an int64 scalar .* got 1.5"),
    "backend": ({"backend": "gpu"}, ValueError, "backend must be one of 'auto', .*, got 'gpu'"),
}


@each(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_arguments(changes: Options, error: type[Exception], message: str) -> None:
    good: Options = {
        "q": torch.randn(TOTAL, H, D),
        "k": torch.randn(TOTAL, H, D),
        "v": torch.randn(TOTAL, H, D),
        "cu_seqlens_q": STARTS,
    }
    with pytest.raises(error, match=message):
        tk.attention_varlen(**good | changes)
