"""Hybrid models of transformers: small ones with random weights, and which functions they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from transformer_kernels.integrations.huggingface import linear_functions

SERVED = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    *("kimi_linear", "bailing_hybrid"),
    *("granitemoehybrid", "falcon_h1", "nemotron_h", "bamba", "zamba2", "mamba2"),
    *("minimax", "lfm2", "lfm2_moe", "lfm3"),
)
"""Families whose documents are separated."""
REFUSED = (
    *("jamba", "mamba", "falcon_mamba", "zamba", "recurrent_gemma", "zaya", "inkling2"),
    *("glm5_next_text", "qwen4_exp_text"),
)
"""Families in whose layers the tokens of packed documents meet."""

LENGTHS = (7, 1, 4, 9)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
CU_SEQLENS = torch.tensor([0, 7, 8, 12, 21], dtype=torch.int32)

OPERATORS = (
    *("gated_delta_rule", "gated_delta_rule_varlen", "gated_delta_rule_step"),
    *("linear_attention", "linear_attention_varlen", "causal_conv1d", "causal_conv1d_step"),
)


def output_of(model: Any, *args: Any, **named: Any) -> Tensor:
    found = model(*args, **named)
    output: Tensor = found["logits"] if "logits" in found else found[0]
    return output


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Context with the number of calls of each operator, which are known after it."""
    patches = {
        name: mock.patch.object(linear_functions, name, wraps=getattr(linear_functions, name))
        for name in OPERATORS
    }
    calls: dict[str, int] = {}
    mocks = {name: patch.start() for name, patch in patches.items()}
    try:
        yield calls
    finally:
        for name, patch in patches.items():
            calls[name] = mocks[name].call_count
            patch.stop()
