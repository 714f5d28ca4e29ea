"""Sums of rectangles, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.finite_masks import H_Q, SCALE, B, M, N, by_formula, draw
from transformer_kernels.backends import CpuBackend
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.distributed import partial
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem import Saved
from transformer_kernels.problem.dense import dense_problem

BACKEND = CpuBackend()


@pytest.mark.parametrize("value", [0.0, -1e6, -1e9])
def test_rows_that_a_finite_bias_hides(value: float) -> None:
    """Ranks with different numbers of keys, and with no key for the last rows."""
    bias = torch.zeros(1, 1, M, N)
    bias[:, :, 3:9] = value
    visible = torch.ones(M, N, dtype=torch.bool)
    visible[30:, 7:] = False
    call = draw({"bias": bias, "mask": Mask.dense(visible)}, torch.float32)
    q, k, v, do, dlse, _ = call
    shares = (slice(0, 7), slice(7, 60), slice(60, N))
    problems = [
        dense_problem(
            q, k[:, :, at], v[:, :, at],
            mask=Mask.dense(visible[:, at]), bias=bias[..., at], scale=SCALE,
        )
        for at in shares
    ]  # fmt: skip
    total = partial.no_keys(dense_problem(q, k, v).shape)
    assert total.row_stats.shape == (2, B, H_Q, M)
    masks: list[Tensor | None] = []
    for problem, at in zip(problems, shares, strict=True):
        part = partial.forward(BACKEND, problem, q, k[:, :, at], v[:, :, at])
        masks.append(part.block_mask)
        partial.add(total, slice(0, M), part)
    got = {"o": total.o, "lse": total.row_stats[0], "dq": torch.zeros_like(q)}
    of_keys: dict[str, list[Tensor]] = {"k": [], "v": []}
    for problem, at, block_mask in zip(problems, shares, masks, strict=True):
        saved = Saved(q, k[:, :, at], v[:, :, at], *total, block_mask)
        gradients = partial.backward(BACKEND, problem, saved, do, dlse, ())
        got["dq"] += gradients["q"]
        for name, parts in of_keys.items():
            parts.append(gradients[name])
    got |= {f"d{name}": torch.cat(parts, dim=2) for name, parts in of_keys.items()}
    exact, plain = by_formula(call, torch.float64), by_formula(call, torch.float32)
    for name, x in got.items():
        assert_within_rule(name, x, exact[name], plain[name])
