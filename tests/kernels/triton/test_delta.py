"""Pairs and triangular inverses of the delta rule in the Triton kernels: what its results hide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_kernels.backends.triton.target import chip
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.linear.delta.triton import tiles
from transformer_kernels.linear.delta.triton.launch import Prepared, prepare_pairs
from transformer_kernels.linear.delta.triton.passes import prepare
from transformer_kernels.linear.delta.types import Inputs, Options

pytestmark = pytest.mark.usefixtures("poisoned")

D = 8


def inputs(device: torch.device, *, equal_keys: bool = False, gates: int = 1) -> Inputs:
    """One full chunk of one head."""
    C = tiles.tile(chip(device), D, tiles.precision(chip(device), torch.float32), channels=False)
    shape = 1, 1, C.chunk
    q, k, v = (torch.randn(*shape, D, device=device) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    if equal_keys:
        k = k[:, :, :1].expand_as(k).contiguous()
    decay = torch.zeros(*shape, gates, device=device)
    return Inputs(q, k, v, decay, torch.ones(shape, device=device))


def pairs(x: Inputs) -> Prepared:
    return prepare_pairs(prepare(x, Options(scale=0.5)))


def exact_pairs(a: Tensor, x: Inputs) -> Tensor:
    """Products of rows a and k with the decay of their channels, in float64; all j <= i."""
    c = x.log_decay[0, 0].double().cumsum(0)
    products = torch.einsum(
        "id,jd,ijd->ij", a[0, 0].double(), x.k[0, 0].double(), (c[:, None] - c[None]).exp()
    )
    return products.tril()


@pytest.mark.parametrize("equal_keys", [True, False])
def test_the_inverse_is_accurate_where_powers_of_the_triangle_would_overflow(
    device: torch.device, equal_keys: bool
) -> None:
    """With equal keys and beta = 1 the triangle is full of ones, and its powers have elements of
    10^8; its inverse has two diagonals."""
    x = inputs(device, equal_keys=equal_keys)
    made = pairs(x)
    X, T = made.X[0, 0].double(), made.T[0, 0]
    eye = torch.eye(len(X), dtype=torch.float64, device=device)
    exact = torch.linalg.inv(eye + X)
    plain = torch.linalg.solve_triangular(eye.float() + made.X[0, 0], eye.float(), upper=False)
    assert_within_rule("T", T, exact, plain)


@pytest.mark.parametrize("log_decay", [0.0, -0.1, -40.0, -200.0])
def test_pairs_are_exact_for_any_decay_of_the_channels(
    device: torch.device, log_decay: float
) -> None:
    """Over a chunk the sums reach -6400: exp of their negative would overflow."""
    x = inputs(device, gates=D)
    x = x._replace(log_decay=log_decay * torch.rand(x.log_decay.shape, device=device))
    made = pairs(x)
    X, P = exact_pairs(x.k, x).tril(-1), 0.5 * exact_pairs(x.q, x)
    assert_within_rule("X", made.X[0, 0], X, X.float())
    assert_within_rule("P", made.P[0, 0], P, P.float())
