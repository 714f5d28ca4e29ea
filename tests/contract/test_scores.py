"""Relative keys: the dense form, clamped distances, dtypes, gradients, hidden NaN, threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import transformer_kernels as tk
from tests.support.backends import WITH_FLOAT64
from tests.support.threads import threads
from tests.support.tiers import crossed, each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.constraints import Align
from transformer_kernels.scores.relative import by_pair, distances, products_by_pair

ALIGNS: tuple[Align, ...] = ("top_left", "bottom_right")
H, M, N, D = 2, 5, 7, 4
SIZES = [(3, 3), (2, 5), (5, 2), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0), (0, 0)]


def qkv(H_kv: int = H, width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    q, k = torch.randn(1, H, M, width), torch.randn(1, H_kv, N, width)
    return q.requires_grad_(), k.requires_grad_(), torch.randn_like(k).requires_grad_()


def assert_same(inside: Tensor, outside: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """Asserts that two outputs agree, and their gradients by `leaves`."""
    assert_same_function(inside, outside)
    assert_same_function(
        torch.autograd.grad(inside.square().sum(), leaves),
        torch.autograd.grad(outside.square().sum(), leaves),
    )


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("M", "N"), SIZES)
@pytest.mark.parametrize("heads", [1, 2])
def test_products_of_every_pair(M: int, N: int, align: Align, heads: int) -> None:
    """Tables that are narrower and wider than the distances, and beyond them on each side."""
    d = N - M if align == "bottom_right" else 0
    q = torch.randn(3, 2, M, D, dtype=torch.float64)
    for entries, lowest in ((1, 0), (3, -1), (20, -9), (4, 3), (4, -6), (2, 50), (2, -50)):
        keys = torch.randn(heads, entries, D, dtype=torch.float64)
        relative = tk.relative_keys(keys, lowest=lowest, align=align)
        bias = relative.as_bias(q, N, scale=0.3)
        assert bias.shape == (3, 2, M, N)
        distance = torch.arange(M)[:, None] + d - torch.arange(N)
        gathered = keys[:, (distance - lowest).clamp(0, entries - 1)]
        expected = 0.3 * torch.einsum("bhmd,hmnd->bhmn", q, gathered.expand(2, -1, -1, -1))
        assert_same_function(bias, expected)


@each(("M", "N"), SIZES)
def test_skew(M: int, N: int) -> None:
    """Products with the unit vectors of the distances are by_pair of q's elements."""
    _, count = distances(M, N, "top_left")
    q = torch.randn(1, 1, M, count)
    products = products_by_pair(q, torch.eye(count)[None], N)
    assert products.shape == (1, 1, M, N)
    for i in range(M):
        assert torch.equal(products[0, 0, i], by_pair(q[0, :, i], M, N)[0, i])


def test_keys_of_all_distances_are_not_copied() -> None:
    keys = torch.randn(H, 30, D)
    expanded = tk.relative_keys(keys, lowest=-12).by_distance(M, N, torch.float32)
    assert expanded.data_ptr() == keys[:, 6:].data_ptr()


@pytest.mark.parametrize(
    ("D", "H_kv", "align"),
    [
        (8, 2, "top_left"),
        (41, 1, "bottom_right"),
        pytest.param(41, 1, "top_left", marks=pytest.mark.exhaustive),
        pytest.param(64, 4, "bottom_right", marks=pytest.mark.exhaustive),
        pytest.param(129, 2, "top_left", marks=pytest.mark.exhaustive),
        pytest.param(129, 2, "bottom_right", marks=pytest.mark.exhaustive),
    ],
)
def test_equals_its_dense_form(D: int, H_kv: int, align: Align, backend: str) -> None:
    """With grouped heads and a table of the same distances, and all gradients."""
    q = torch.randn(2, 4, 67, D, requires_grad=True)
    k, v = (torch.randn(2, H_kv, 131, D, requires_grad=True) for _ in range(2))
    keys = torch.randn(4, 33, D, requires_grad=True)
    table = torch.randn(4, 33, requires_grad=True)
    relative = tk.relative_keys(keys, table=table, lowest=-20, align=align)
    inside = tk.attention(q, k, v, relative=relative, backend=backend)
    outside = tk.attention(q, k, v, bias=relative.as_bias(q, 131), backend="reference")
    assert_same(inside, outside, (q, k, v, keys, table))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]
)
def test_tiles_between_hidden_tiles(seed: int, backend: str) -> None:
    """Tiles of keys whose neighbours are hidden from all queries of a tile, on either side."""
    q = torch.randn(1, H, 193, 8, requires_grad=True)
    k, v = (torch.randn(1, H, 450, 8, requires_grad=True) for _ in range(2))
    keys = torch.randn(H, 700, 8, requires_grad=True)
    relative = tk.relative_keys(keys, lowest=-460)
    generator = torch.Generator().manual_seed(seed)
    layout = torch.rand(1, 4, 8, generator=generator) < 0.5
    layout[0, 1] = torch.arange(8) % 2 == seed % 2
    mask = tk.Mask.block_sparse(layout, 64)
    inside = tk.attention(q, k, v, mask=mask, relative=relative, backend=backend)
    bias = relative.as_bias(q, 450)
    outside = tk.attention(q, k, v, mask=mask, bias=bias, backend="reference")
    assert_same(inside, outside, (q, k, v, keys))


@pytest.mark.parametrize(
    ("entries", "lowest", "shared"),
    [(3, -1, False), (3, -1, True), (2, 4, False), (2, -9, False), (20, -9, True), (1, 0, True)],
    ids=["both", "both-shared", "below", "above", "none", "one"],
)
def test_gradient_of_clamped_ends(entries: int, lowest: int, shared: bool, backend: str) -> None:
    """Gradient of the keys alone. The ends have the sums of all distances beyond them."""
    q, k, v = (x.detach() for x in qkv(H_kv=1))
    keys = torch.randn(1 if shared else H, entries, D, requires_grad=True)
    relative = tk.relative_keys(keys, lowest=lowest, align="bottom_right")
    o = tk.attention(q, k, v, relative=relative, backend=backend)
    (inside,) = torch.autograd.grad(o.square().sum(), keys)
    distance = torch.arange(M)[:, None] + N - M - torch.arange(N) - lowest
    gathered = keys[:, distance.clamp(0, entries - 1)].expand(H, -1, -1, -1)
    bias = torch.einsum("bhmd,hmnd->bhmn", q, gathered) * D**-0.5
    o = tk.attention(q, k, v, bias=bias, backend="reference")
    (outside,) = torch.autograd.grad(o.square().sum(), keys)
    assert_same_function(inside, outside)
    read = torch.zeros(entries, dtype=torch.bool)
    read[distance.clamp(0, entries - 1).flatten()] = True
    assert not inside[:, ~read].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_keys", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype, of_keys: torch.dtype, backend: str) -> None:
    """The kernels read the keys in q's dtype; the gradient has the keys' own dtype."""
    q, k, v = (x.detach().to(dtype) for x in qkv())
    keys = torch.randint(-8, 9, (1, 3, D)).div(8).to(of_keys).requires_grad_()
    same = keys.detach().to(dtype).requires_grad_()
    o, expected = (
        tk.attention(q, k, v, relative=tk.relative_keys(x, lowest=-1), backend=backend)
        for x in (keys, same)
    )
    assert torch.equal(o, expected)
    (gradient,) = torch.autograd.grad(o.square().sum(), keys)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), same)
    assert gradient.dtype == of_keys
    narrower = max(dtype, of_keys, key=lambda dtype: torch.finfo(dtype).eps)
    assert_same_function(gradient, expected_gradient.to(of_keys), dtype=narrower)
    assert gradient.any()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", WITH_FLOAT64)
def test_derivatives(shared: bool, name: str) -> None:
    """First and second order, backward and forward, with a table, a softcap and clamped ends."""

    def call(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        relative = tk.relative_keys(keys, table=table, lowest=-1, align="bottom_right")
        return tk.attention(q, k, v, relative=relative, softcap=0.9, return_lse=True, backend=name)

    heads = 1 if shared else H
    given = (*(x[:, :, :4] for x in qkv(H_kv=1, width=3)),)
    given += (torch.randn(heads, 3, 3), torch.randn(heads, 3))
    given = tuple(x.detach().double().requires_grad_() for x in given)
    assert gradcheck(call, given, check_forward_ad=True)
    assert gradgradcheck(call, given, check_fwd_over_rev=True, fast_mode=True)


MASKS = {
    "causal": (tk.Mask.causal(), (None, 0)),
    "window": (tk.Mask.window(20, 5), (-20, 5)),
    "behind": (tk.Mask.window(90, -3), (-90, -3)),
    "end": (tk.Mask.window(20, 5, align="bottom_right"), (64 - 20, 64 + 5)),
}


@pytest.mark.quick
@pytest.mark.parametrize(("mask", "dtype"), crossed(MASKS, [(torch.float32,), (torch.bfloat16,)]))
def test_distances_that_the_diagonals_hide_may_be_nan(
    mask: str, dtype: torch.dtype, backend: str
) -> None:
    """The nearest hidden distances too. NaN changes no bit of a result."""
    rows, columns = 67, 131
    given, (low, high) = MASKS[mask]
    q = torch.randn(1, H, rows, 16, dtype=dtype)
    k, v = (torch.randn(1, H, columns, 16, dtype=dtype) for _ in range(2))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    clean = torch.randn(H, rows + columns - 1, 16, dtype=dtype)
    diagonal = columns - 1 - torch.arange(rows + columns - 1)  # j - i
    hidden = diagonal > high if high is not None else torch.zeros_like(diagonal).bool()
    hidden |= diagonal < low if low is not None else False
    results = []
    for value in (0.0, float("nan")):
        keys = clean.masked_fill(hidden[:, None], value).requires_grad_()
        relative = tk.relative_keys(keys, lowest=1 - columns)
        o = tk.attention(q, k, v, mask=given, relative=relative, backend=backend)
        results.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v, keys))))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)
    assert not results[1][-1][:, hidden].any()
    assert results[1][-1][:, ~hidden].any(dim=2).all()


def test_nan_of_hidden_rows(backend: str) -> None:
    """Keys behind the padding, and queries that the window leaves without a key."""
    q, k, v = (x.detach() for x in qkv())
    keys = torch.randn(H, 11, D, requires_grad=True)
    mask = tk.Mask.padding(torch.tensor([5])) & tk.Mask.window(None, -2)
    results = []
    for value in (0.0, float("nan")):
        k[:, :, 5:], v[:, :, 5:], q[:, :, :2] = value, value, value
        given = tuple(x.clone().requires_grad_() for x in (q, k, v))
        relative = tk.relative_keys(keys, lowest=-4)
        o = tk.attention(*given, mask=mask, relative=relative, backend=backend)
        results.append((o, *torch.autograd.grad(o.square().sum(), (*given, keys))))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("length", [0, N])
def test_gradient_of_a_cache_with_hidden_nan(length: int) -> None:
    """Queries without a key, and distances that the causal diagonal hides."""
    q, k, v = (x.detach() for x in qkv())
    if length == 0:
        q = q.fill_(float("nan"))
    keys = torch.randn(H, 12, D)
    keys[:, :3] = float("nan")
    keys.requires_grad_()
    relative = tk.relative_keys(keys, lowest=-3, align="bottom_right")
    q.requires_grad_()
    o = tk.attention_decode(q, k, v, torch.tensor([length]), relative=relative, backend="reference")
    for gradient in torch.autograd.grad(o.square().sum(), (q, keys)):
        assert gradient.isfinite().all()
        assert gradient.any() == (length > 0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_on_several_threads(count: int, causal: bool) -> None:
    """One head: its keys are split among the threads. Equal bits in every run."""
    q, k, v = (torch.randn(1, 1, 700, D) for _ in range(3))
    keys = torch.randn(1, 1400, D, requires_grad=True)
    relative = tk.relative_keys(keys, lowest=-700)
    mask = tk.Mask.causal() if causal else None

    def gradient(backend: str) -> Tensor:
        o = tk.attention(q, k, v, mask=mask, relative=relative, backend=backend)
        return torch.autograd.grad(o.square().sum(), keys)[0]

    with threads(count):
        first, *others = (gradient("cpu") for _ in range(4))
    assert all(torch.equal(first, other) for other in others)
    assert_same_function(first, gradient("reference"))


@pytest.mark.parametrize(("M", "N"), [(0, 3), (3, 0), (0, 0), (1, 1), (1, 70), (70, 1)])
def test_few_or_no_rows(M: int, N: int, backend: str) -> None:
    q, k = torch.randn(2, H, M, D, requires_grad=True), torch.randn(2, H, N, D)
    keys = torch.randn(H, 9, D, requires_grad=True)
    relative = tk.relative_keys(keys, lowest=-4, align="bottom_right")
    o = tk.attention(q, k, k, relative=relative, backend=backend)
    expected = tk.attention(q, k, k, bias=relative.as_bias(q, N), backend="reference")
    assert_same(o, expected, (q, keys))
