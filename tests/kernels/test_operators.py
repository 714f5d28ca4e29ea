"""Operators called directly check the sizes of tables that kernels read by distance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.backends import COMPILED_BACKENDS, operators_of
from tests.support.operators import operator_arguments
from transformer_kernels.scores.options import DIFFERENTIABLE

H, M, N, D = 2, 5, 9, 4
STARTS = torch.tensor([0, 3, 5], dtype=torch.int32)
KEY_STARTS = torch.tensor([0, 2, 9], dtype=torch.int32)
LENGTHS = torch.tensor([N], dtype=torch.int32)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, H, M, D), torch.randn(1, H, N, D), torch.randn(1, H, N, D)


def packed(**given: Any) -> dict[str, Any]:
    return {"cu_seqlens_q": STARTS, "cu_seqlens_k": KEY_STARTS, **given}


TABLES: dict[str, dict[str, Any]] = {
    "short": {"relative_bias": torch.ones(H, M + N - 2)},
    "long": {"relative_bias": torch.ones(1, M + N)},
    "heads": {"relative_bias": torch.ones(3, M + N - 1)},
    "1d": {"relative_bias": torch.ones(M + N - 1)},
    "half": {"relative_bias": torch.ones(H, M + N - 1).half()},
    "double": {"relative_bias": torch.ones(H, M + N - 1).double()},
    "cache": {"relative_bias": torch.ones(H, M + N), "cache_seqlens": LENGTHS},
    "packed": packed(relative_bias=torch.ones(H, M + N - 1), max_seqlen_q=3, max_seqlen_k=7),
    "packed-huge": packed(relative_bias=torch.ones(H, M + N - 1), max_seqlen_k=(1 << 63) - 1),
}
KEYS: dict[str, dict[str, Any]] = {
    "short": {"relative_keys": torch.ones(H, M + N - 2, D)},
    "long": {"relative_keys": torch.ones(1, M + N, D)},
    "heads": {"relative_keys": torch.ones(3, M + N - 1, D)},
    "no-heads": {"relative_keys": torch.ones(0, M + N - 1, D)},
    "2d": {"relative_keys": torch.ones(H, M + N - 1)},
    "width": {"relative_keys": torch.ones(H, M + N - 1, D + 1)},
    "half": {"relative_keys": torch.ones(H, M + N - 1, D).half()},
    "double": {"relative_keys": torch.ones(H, M + N - 1, D).double()},
    "packed": packed(relative_keys=torch.ones(H, M + N - 1, D), max_seqlen_q=3, max_seqlen_k=7),
    "packed-huge": packed(relative_keys=torch.ones(H, M + N - 1, D), max_seqlen_k=(1 << 63) - 1),
    "with-a-table": {
        "relative_keys": torch.ones(H, M + N, D),
        "relative_bias": torch.ones(H, M + N - 1),
    },
}
REFUSED = {f"table-{name}": given for name, given in TABLES.items()}
REFUSED |= {f"keys-{name}": given for name, given in KEYS.items()}
MESSAGES = {
    "table": r"relative_bias must be \(1\|H_q, distances\), in float",
    "keys": r"relative_keys must be \(1\|H_q, distances, D\), in q's dtype",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_other_sizes_are_refused(name: str, backend: str) -> None:
    arguments = operator_arguments(*qkv(), **REFUSED[name])
    with pytest.raises(RuntimeError, match=MESSAGES[name.partition("-")[0]]):
        operators_of(backend).attention_forward(**arguments)


def test_keys_of_a_cache_have_its_distances() -> None:
    """On the CPU, whose kernels alone read the keys of a cache."""
    arguments = {"relative_keys": torch.ones(H, M + N, D), "cache_seqlens": LENGTHS}
    with pytest.raises(RuntimeError, match=MESSAGES["keys"]):
        torch.ops.transformer_kernels.attention_forward(**operator_arguments(*qkv(), **arguments))


@pytest.mark.parametrize("width", [(), (D,)], ids=["table", "keys"])
@pytest.mark.parametrize("longest", [{"max_seqlen_q": 2}, {"max_seqlen_k": 6}], ids=str)
def test_sequences_beyond_their_bounds_are_refused(
    longest: dict[str, int], width: tuple[int, ...]
) -> None:
    """On the CPU, where reading the lengths does not wait for a device."""
    bounds = {"max_seqlen_q": 3, "max_seqlen_k": 7} | longest
    name = "relative_keys" if width else "relative_bias"
    entries = torch.ones(H, sum(bounds.values()) - 1, *width)
    arguments = operator_arguments(*qkv(), **packed(**{name: entries}, **bounds))
    with pytest.raises(RuntimeError, match="no sequence may be longer than max_seqlen_q and"):
        torch.ops.transformer_kernels.attention_forward(**arguments)


@pytest.mark.parametrize("name", ["relative_bias", "relative_keys"])
def test_a_gradient_needs_its_option(name: str) -> None:
    q, k, v, *options = operator_arguments(*qkv()).values()
    o, row_stats, block_mask = torch.ops.transformer_kernels.attention_forward(q, k, v, *options)
    saved = (o, None, q, k, v, o, row_stats, block_mask)
    wanted = [option == name for option in DIFFERENTIABLE]
    with pytest.raises(RuntimeError, match=f"{name}_needs_grad requires {name}"):
        torch.ops.transformer_kernels.attention_backward(*saved, *options, *wanted, False)
