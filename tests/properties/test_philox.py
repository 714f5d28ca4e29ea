"""Dropout bits: known answers of Random123, an integer Philox, and statistics."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.tiers import each
from transformer_kernels.scores.philox import keep_factor, keep_mask, keep_threshold, philox

Words = tuple[int, int]

# Random123's kat_vectors, philox2x32 7: (counter, key, answer)
ONES = 0xFFFFFFFF
KNOWN_ANSWERS: list[tuple[Words, int, Words]] = [
    ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
    ((ONES, ONES), ONES, (0xAB302C4D, 0x3DC9D239)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
]


def philox_of_integers(key: int, counter: Words) -> Words:
    """Philox2x32-7 in Python integers. Source: Salmon et al. 2011."""
    x0, x1 = counter
    for _ in range(7):
        product = 0xD256D193 * x0
        x0, x1 = product >> 32 ^ key ^ x1, product & ONES
        key = (key + 0x9E3779B9) & ONES
    return x0, x1


def kept_by_backend(seed: int, p: float, sizes: tuple[int, int, int, int], backend: str) -> Tensor:
    """Returns the kept weights of a call, bool (B, H, M, N), observed through v = identity."""
    B, H, M, N = sizes
    q, k = torch.zeros(B, H, M, 1), torch.zeros(B, H, N, 1)
    v = torch.eye(N).expand(B, H, N, N)
    return tk.attention(q, k, v, dropout_p=p, seed=seed, backend=backend) != 0


@each(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: Words, key: int, answer: Words) -> None:
    assert philox_of_integers(key, counter) == answer
    words = philox(torch.tensor(key), *(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in words) == answer


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_dropout_bits_of_every_backend(seed: int, backend: str) -> None:
    """docs/attention.md, section 7, element by element."""
    B, H, M, N, p = 2, 2, 35, 150, 0.3
    kept = kept_by_backend(seed, p, (B, H, M, N), backend)
    for b, h in itertools.product(range(B), range(H)):
        key, start = philox_of_integers(seed & ONES, (h, b))
        key ^= seed >> 32 & ONES
        for i, j in itertools.product(range(M), range(N)):
            counters = [(n >> 4) * 8 + (n & 7) for n in (i, j)]
            words = philox_of_integers(key, ((start + counters[0]) & ONES, counters[1]))
            half = words[i >> 3 & 1] >> 16 * (j >> 3 & 1) & 0xFFFF
            assert bool(kept[b, h, i, j]) == (half >= round(p * 2**16))


@pytest.mark.quick
def test_backends_agree_with_keep_mask(backend: str) -> None:
    sizes = (2, 3, 67, 197)
    expected = keep_mask(torch.tensor(99), *sizes, 0.5)
    assert torch.equal(kept_by_backend(99, 0.5, sizes, backend), expected)


def test_bits_do_not_depend_on_the_sizes() -> None:
    large = keep_mask(torch.tensor(3), 3, 4, 20, 200, 0.4)
    assert torch.equal(keep_mask(torch.tensor(3), 2, 3, 11, 130, 0.4), large[:2, :3, :11, :130])


@each("p", [0.05, 0.1, 0.5, 0.9])
def test_share_of_kept_weights(p: float) -> None:
    """Within 5 standard deviations, overall and along every index; neighbours are independent."""
    kept = keep_mask(torch.tensor(11), 4, 4, 64, 256, p).double()
    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        count = kept.numel() / kept.mean(dims).numel()
        deviation = (p * (1 - p) / count) ** 0.5
        assert ((kept.mean(dims) - (1 - p)).abs() < 5 * deviation).all(), dims
    centred = kept - (1 - p)
    for dim in range(4):
        n = centred.size(dim) - 1
        pairs = centred.narrow(dim, 0, n) * centred.narrow(dim, 1, n)
        assert pairs.mean().abs() < 5 * p * (1 - p) / pairs.numel() ** 0.5, dim


def test_other_seeds_give_other_bits() -> None:
    masks = [keep_mask(torch.tensor(seed), 1, 1, 32, 64, 0.5) for seed in (0, 1, 1 << 32, -1)]
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).double().mean() < 0.6


def test_thresholds() -> None:
    assert keep_threshold(0.0) == 0
    assert keep_threshold(0.5) == 1 << 15
    assert keep_threshold(1.0) == 0xFFFF


@each("p", [0.0, 1e-6, 1e-5, 0.1, 0.5, 0.999, 0.9999, 0.99999, 0.9999999])
def test_the_mean_dropout_factor_is_1(p: float) -> None:
    """The factor belongs to the rounded probability: it is exact for every one of 2^16 numbers."""
    kept = 2**16 - keep_threshold(p)
    assert keep_factor(p) * kept / 2**16 == 1.0


@pytest.mark.quick
@pytest.mark.parametrize("p", [1e-5, 0.9999, 0.99999])
def test_the_dropout_factor_belongs_to_the_rounded_probability(p: float, backend: str) -> None:
    """With equal scores, o is the number of kept keys times the factor / N; dv is the same sum."""
    q, k = torch.zeros(1, 1, 64, 1), torch.zeros(1, 1, 2048, 1)
    v = torch.ones(1, 1, 2048, 1, requires_grad=True)
    o = tk.attention(q, k, v, dropout_p=p, seed=6, backend=backend)
    (dv,) = torch.autograd.grad(o.sum(), v)
    kept = keep_mask(torch.tensor(6), 1, 1, 64, 2048, p).double() / 2048
    factor = 2**16 / (2**16 - keep_threshold(p))
    assert kept.any()
    torch.testing.assert_close(o[..., 0].double(), factor * kept.sum(3), rtol=1e-5, atol=0)
    torch.testing.assert_close(dv[..., 0].double(), factor * kept.sum(2), rtol=1e-5, atol=0)


def test_dropout_preserves_the_mean(backend: str) -> None:
    """Kept weights are scaled by 1 / (1 - p): the mean is preserved within 5 deviations."""
    rows, p = 4096, 0.25
    q, k, v = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, 64, 1), torch.ones(1, 1, 64, 1)
    o = tk.attention(q, k, v, dropout_p=p, seed=5, backend=backend).double()
    deviation = (p / (1 - p) / 64 / rows) ** 0.5
    assert abs(o.mean() - 1.0) < 5 * deviation


def test_seed_comes_from_torchs_generator(backend: str) -> None:
    x = torch.randn(1, 1, 16, 16)

    def call() -> Tensor:
        return tk.attention(x, x, x, dropout_p=0.5, backend=backend)

    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert torch.equal(call(), first)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    tk.attention(x, x, x, dropout_p=0.5, seed=3, backend=backend)
    tk.attention(x, x, x, backend=backend)
    assert torch.equal(torch.get_rng_state(), state), "a call without need of a seed draws none"


def test_seed_as_a_tensor(backend: str) -> None:
    x = torch.randn(1, 1, 16, 16)
    by_int = tk.attention(x, x, x, dropout_p=0.5, seed=77, backend=backend)
    by_tensor = tk.attention(x, x, x, dropout_p=0.5, seed=torch.tensor(77), backend=backend)
    assert torch.equal(by_int, by_tensor)
