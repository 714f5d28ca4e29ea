"""Terms of the scores: ALiBi, sinks, biases and keys by distance. The dense forms of the biases,
clamped distances, dtypes, gradients, hidden NaN, threads.

Tables of cases compare all of them with float64 in every kernel.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import transformer_kernels as tk
from tests.support.backends import WITH_FLOAT64
from tests.support.runtime import threads
from tests.support.tiers import crossed, each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.constraints import Align
from transformer_kernels.scores.relative import by_pair, distances, products_by_pair
from transformer_kernels.scores.sinks import join_sinks

Kind = Literal["table", "keys"]
ALIGNS: tuple[Align, ...] = ("top_left", "bottom_right")
H, M, N, D = 2, 5, 7, 4
SIZES = [(3, 3), (2, 5), (5, 2), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0), (0, 0)]
TABLES = ((1, 0), (3, -1), (20, -9), (4, 3), (4, -6), (2, 50), (2, -50))
"""Entries and lowest distances: narrower and wider than the distances, and beyond them."""
every_kind = pytest.mark.parametrize("kind", ["table", "keys"])


def qkv(H_kv: int = H, width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    q, k = torch.randn(1, H, M, width), torch.randn(1, H_kv, N, width)
    return q.requires_grad_(), k.requires_grad_(), torch.randn_like(k).requires_grad_()


def entries_of(kind: Kind, heads: int, count: int) -> Tensor:
    """A random table, or keys."""
    return torch.randn(heads, count, *((D,) if kind == "keys" else ()))


def relative_of(kind: Kind, entries: Tensor, **options: Any) -> tk.RelativeBias | tk.RelativeKeys:
    return (tk.relative_keys if kind == "keys" else tk.relative_bias)(entries, **options)


def assert_same(inside: Tensor, outside: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """Asserts that two outputs agree, and their gradients by `leaves`."""
    assert_same_function(inside, outside)
    assert_same_function(
        torch.autograd.grad(inside.square().sum(), leaves),
        torch.autograd.grad(outside.square().sum(), leaves),
    )


def test_slopes_of_the_paper() -> None:
    eight = [2.0**-h for h in range(1, 9)]
    assert tk.alibi_slopes(8).tolist() == eight
    assert tk.alibi_slopes(1).tolist() == [2.0**-8]
    # The code of Press et al. for 12 heads: the slopes for 8, then every other one for 16.
    extra = [2.0 ** (-0.5 * h) for h in (1, 3, 5, 7)]
    torch.testing.assert_close(tk.alibi_slopes(12), torch.tensor(eight + extra))


@each(("M", "N"), [(3, 3), (2, 5), (5, 2)])
def test_dense_form_of_alibi(M: int, N: int) -> None:
    slopes = torch.tensor([0.5, 0.125])
    offsets: dict[Align, int] = {"top_left": 0, "bottom_right": N - M}
    for align, d in offsets.items():
        bias = tk.alibi(slopes, align=align).dense(M, N)
        for h, i, j in product(range(2), range(M), range(N)):
            assert bias[0, h, i, j] == -slopes[h] * abs(i + d - j)


def test_causal_alibi_equals_the_formula_of_the_paper() -> None:
    """slope * (j - i) and slope * j differ by a constant per row, which the softmax cancels."""
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    slopes = tk.alibi_slopes(2)
    papers = slopes[None, :, None, None] * torch.arange(9.0)
    causal = tk.Mask.causal()
    assert_same_function(
        tk.attention(q, k, v, bias=tk.alibi(slopes), mask=causal),
        tk.attention(q, k, v, bias=papers, mask=causal),
    )


def test_half_precision_slopes(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.bfloat16) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25])
    half, full = (
        tk.attention(q, k, v, bias=tk.alibi(x), backend=backend)
        for x in (slopes.bfloat16(), slopes)
    )
    assert torch.equal(half, full)


def test_gradient_of_slopes() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    bias = tk.alibi(slopes)
    (inside,) = torch.autograd.grad(tk.attention(q, k, v, bias=bias).square().sum(), slopes)
    dense = bias.dense(5, 5)
    (outside,) = torch.autograd.grad(tk.attention(q, k, v, bias=dense).square().sum(), slopes)
    assert_same_function(inside, outside)
    assert inside.abs().min() > 0


@each("sink", [-60.0, -12.0, 0.0, 12.0, 60.0])
def test_gradients_are_accurate_for_sinks_of_any_weight(sink: float) -> None:
    """1 - sigmoid(x) would lose all digits of a sink's small weight."""
    o, do = torch.rand(1, 2, 5, 8), torch.rand(1, 2, 5, 8)
    lse, sinks = torch.randn(1, 2, 5), torch.full((2,), sink)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (o, lse, sinks)]
        joined, _ = join_sinks(*leaves)
        return torch.autograd.grad(joined, leaves, do.to(dtype))

    for got, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=0.0)


@each(
    ("M", "N", "align", "heads"), [(*sizes, *x) for sizes in SIZES for x in product(ALIGNS, (1, 2))]
)
def test_dense_form_of_a_table(M: int, N: int, align: Align, heads: int) -> None:
    d = N - M if align == "bottom_right" else 0
    for entries, lowest in TABLES:
        table = torch.randn(heads, entries)
        bias = tk.relative_bias(table, lowest=lowest, align=align).dense(M, N)
        assert bias.shape == (1, heads, M, N)
        for h, i, j in product(range(heads), range(M), range(N)):
            clamped = min(max(i + d - j, lowest), lowest + entries - 1)
            assert bias[0, h, i, j] == table[h, clamped - lowest]


@each(
    ("M", "N", "align", "heads"), [(*sizes, *x) for sizes in SIZES for x in product(ALIGNS, (1, 2))]
)
def test_products_of_every_pair(M: int, N: int, align: Align, heads: int) -> None:
    d = N - M if align == "bottom_right" else 0
    q = torch.randn(3, 2, M, D, dtype=torch.float64)
    for entries, lowest in TABLES:
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


@each("align", ALIGNS)
def test_table_of_every_distance(align: Align) -> None:
    lowest, count = distances(M, N, align)
    distance = torch.arange(lowest, lowest + count)
    table = by_pair(distance[None], M, N)
    d = N - M if align == "bottom_right" else 0
    assert torch.equal(table[0], torch.arange(M)[:, None] + d - torch.arange(N))


@each("kind", ["table", "keys"])
def test_entries_of_all_distances_are_not_copied(kind: Kind) -> None:
    entries = entries_of(kind, H, 30)
    expanded = relative_of(kind, entries, lowest=-12).by_distance(M, N, torch.float32)
    assert expanded.data_ptr() == entries[:, 6:].data_ptr()


@pytest.mark.parametrize(("D", "H_kv", "align"), [(8, 2, "top_left"), (41, 1, "bottom_right")])
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


def test_alibi_as_a_table(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv())
    slopes = tk.alibi_slopes(H)
    table = -slopes[:, None] * torch.arange(-N, M + 1).abs()
    assert_same_function(
        tk.attention(q, k, v, relative=tk.relative_bias(table, lowest=-N), backend=backend),
        tk.attention(q, k, v, bias=tk.alibi(slopes), backend=backend),
    )


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


@every_kind
@pytest.mark.parametrize(
    ("count", "lowest", "shared"),
    [(3, -1, False), (3, -1, True), (2, 4, False), (2, -9, False), (20, -9, True), (1, 0, True)],
    ids=["both", "both-shared", "below", "above", "none", "one"],
)
def test_gradient_of_clamped_ends(
    count: int, lowest: int, shared: bool, kind: Kind, backend: str
) -> None:
    """Gradient of the entries alone. The ends have the sums of all distances beyond them."""
    q, k, v = (x.detach() for x in qkv(H_kv=1))
    entries = entries_of(kind, 1 if shared else H, count).requires_grad_()
    relative = relative_of(kind, entries, lowest=lowest, align="bottom_right")
    o = tk.attention(q, k, v, relative=relative, backend=backend)
    (inside,) = torch.autograd.grad(o.square().sum(), entries)
    distance = torch.arange(M)[:, None] + N - M - torch.arange(N) - lowest
    gathered = entries[:, distance.clamp(0, count - 1)]
    bias = gathered[None]
    if kind == "keys":
        gathered = gathered.expand(H, -1, -1, -1)
        bias = torch.einsum("bhmd,hmnd->bhmn", q, gathered) * D**-0.5
    o = tk.attention(q, k, v, bias=bias, backend="reference")
    (outside,) = torch.autograd.grad(o.square().sum(), entries)
    assert_same_function(inside, outside)
    read = torch.zeros(count, dtype=torch.bool)
    read[distance.clamp(0, count - 1).flatten()] = True
    assert not inside[:, ~read].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_of_a_table(dtype: torch.dtype, backend: str) -> None:
    """The kernels read it as float32; its gradient has its own dtype."""
    q, k, v = (x.detach() for x in qkv())
    table = torch.tensor([[0.5, 0.25, -1.0]]).to(dtype).requires_grad_()
    full = table.detach().float().requires_grad_()
    o, expected = (
        tk.attention(q, k, v, relative=tk.relative_bias(x, lowest=-1), backend=backend)
        for x in (table, full)
    )
    assert torch.equal(o, expected)
    (gradient,) = torch.autograd.grad(o.square().sum(), table)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), full)
    assert torch.equal(gradient, expected_gradient.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_keys", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_keys(dtype: torch.dtype, of_keys: torch.dtype, backend: str) -> None:
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
def test_derivatives_of_keys(shared: bool, name: str) -> None:
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


@every_kind
def test_nan_of_hidden_rows(kind: Kind, backend: str) -> None:
    """Keys behind the padding, and queries that the window leaves without a key."""
    q, k, v = (x.detach() for x in qkv())
    entries = entries_of(kind, H, 11).requires_grad_()
    mask = tk.Mask.padding(torch.tensor([5])) & tk.Mask.window(None, -2)
    results = []
    for value in (0.0, float("nan")):
        k[:, :, 5:], v[:, :, 5:], q[:, :, :2] = value, value, value
        given = tuple(x.clone().requires_grad_() for x in (q, k, v))
        relative = relative_of(kind, entries, lowest=-4)
        o = tk.attention(*given, mask=mask, relative=relative, backend=backend)
        results.append((o, *torch.autograd.grad(o.square().sum(), (*given, entries))))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


@each(("kind", "length"), product(["table", "keys"], [0, N]))
def test_gradient_of_a_cache_with_hidden_nan(kind: Kind, length: int) -> None:
    """Queries without a key, and keys of distances that the causal diagonal hides."""
    q, k, v = (x.detach() for x in qkv())
    if length == 0:
        q = q.fill_(float("nan"))
    entries = entries_of(kind, H, 12)
    if kind == "keys":
        entries[:, :3] = float("nan")
    entries.requires_grad_()
    relative = relative_of(kind, entries, lowest=-3, align="bottom_right")
    q.requires_grad_()
    o = tk.attention_decode(q, k, v, torch.tensor([length]), relative=relative, backend="reference")
    for gradient in torch.autograd.grad(o.square().sum(), (q, entries)):
        assert gradient.isfinite().all()
        assert gradient.any() == (length > 0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
@every_kind
def test_gradient_on_several_threads(kind: Kind, count: int, causal: bool) -> None:
    """One head: its keys are split among the threads. Equal bits in every run."""
    q, k, v = (torch.randn(1, 1, 700, D) for _ in range(3))
    entries = entries_of(kind, 1, 1400).requires_grad_()
    relative = relative_of(kind, entries, lowest=-700)
    mask = tk.Mask.causal() if causal else None

    def gradient(backend: str) -> Tensor:
        o = tk.attention(q, k, v, mask=mask, relative=relative, backend=backend)
        return torch.autograd.grad(o.square().sum(), entries)[0]

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
