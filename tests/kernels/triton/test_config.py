"""The table of tiles and the selection of a tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import transformer_kernels as tk
from tests.support.tiers import each
from transformer_kernels.backends import TritonBackend
from transformer_kernels.backends.triton import config, target
from transformer_kernels.backends.triton.config import CHIPS, WIDTHS
from transformer_kernels.problem import Problem
from transformer_kernels.problem.dense import dense_problem

KERNELS: tuple[config.Kernel, ...] = (
    "forward", "decode", "bwd_dkdv", "bwd_dq", "bias_gradient", *config.SQUARE,
)  # fmt: skip


def problem(device: torch.device, D: int, dtype: torch.dtype = torch.float16) -> Problem:
    x = torch.zeros(1, 1, 2, D, dtype=dtype, device=device)
    return dense_problem(x, x, x)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("element_size", [2, 4])
def test_blocks_have_a_size_that_dropout_supports(chip: config.Chip, element_size: int) -> None:
    """Multiples of 16 queries and keys (kernels/dropout.py), and powers of 2 for Triton."""
    for kernel in KERNELS:
        for columns in WIDTHS:
            tile = config.tile(kernel, chip, element_size, columns)
            if tile is None:
                too_small = ("sm80", "sm86") if kernel.startswith("keys") else ("sm86",)
                assert (element_size, columns) == (4, 512)
                assert chip.name in too_small
                continue
            assert tile.block_n in (16, 32, 64, 128)
            assert tile.block_m in (16, 32, 64, 128)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("kernel", config.SQUARE)
def test_tiles_by_distance_are_square_and_divide_64(
    kernel: config.Kernel, chip: config.Chip, element_size: int
) -> None:
    for columns in WIDTHS:
        tile = config.tile(kernel, chip, element_size, columns, score_bytes=4)
        if tile is None:
            continue
        assert config.is_allowed(kernel, tile)
        assert tile.block_m == tile.block_n
        assert 64 % tile.block_n == 0


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("score_bytes", [1, 2, 4, 6, 8])
def test_tiles_with_per_score_loads_fit_shared_memory(chip: config.Chip, score_bytes: int) -> None:
    """Half precision up to width 128 only. For float32 and wide rows the compiler needs additional
    shared memory, which test_compilation.py checks."""
    for kernel in ("forward", "decode", "bwd_dkdv", "bwd_dq"):
        for columns in (64, 128):
            tile = config.tile(kernel, chip, 2, columns, score_bytes)
            plain = config.tile(kernel, chip, 2, columns)
            assert tile is not None
            assert plain is not None
            needed = config.shared_bytes(kernel, chip, tile, 2, columns, score_bytes)
            assert needed <= 1024 * chip.shared_kib
            assert tile.block_m * tile.block_n >= 32 * (32 if kernel == "decode" else 64)
            assert tile.block_m * tile.block_n <= plain.block_m * plain.block_n


def test_position_tests_take_stages_that_no_longer_fit() -> None:
    sm90 = CHIPS["sm90"]
    plain = config.tile("forward", sm90, 2, 128)
    assert plain is not None
    assert config.tile("forward", sm90, 2, 128, key_bytes=16) == replace(plain, stages=2)
    assert config.tile("forward", sm90, 2, 64, key_bytes=16) == config.tile("forward", sm90, 2, 64)


@each(
    ("D", "D_v", "widths"),
    [
        (16, 16, (16, 16)), (24, 16, (32, 32)), (40, 8, (64, 64)), (8, 72, (64, 128)),
        (16, 40, (64, 64)), (128, 16, (128, 64)), (192, 128, (256, 128)), (64, 128, (64, 128)),
    ],
)  # fmt: skip
def test_no_tile_is_narrow_next_to_a_wide_one(D: int, D_v: int, widths: tuple[int, int]) -> None:
    assert config.widths(D, D_v) == widths


def test_a_width_uses_the_next_larger_width_of_the_table() -> None:
    sm90 = CHIPS["sm90"]
    for columns in range(1, 513):
        limit = next(limit for limit in WIDTHS if columns <= limit)
        assert config.tile("forward", sm90, 2, columns) == config.tile("forward", sm90, 2, limit)


@each(("columns", "width"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128), (500, 512)])
def test_widths_are_powers_of_two(columns: int, width: int) -> None:
    assert config.width(columns) == width


@each(
    ("capability", "name"),
    [((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 9), "sm86"), ((9, 0), "sm90"), ((10, 0), "sm100"),
     ((10, 3), "sm100"), ((12, 0), "sm86")],
)  # fmt: skip
def test_the_compute_capability_selects_the_chip(capability: tuple[int, int], name: str) -> None:
    assert config.chip_of(capability).name == name


def test_unsupported_widths_and_dtypes_have_a_reason(device: torch.device) -> None:
    reasons = TritonBackend().unsupported_reasons
    with target.override_chip(CHIPS["sm86"]):
        assert "99 KiB" in reasons(problem(device, 300, torch.float32))[0]
        assert not any("KiB" in reason for reason in reasons(problem(device, 300)))
    keys = torch.zeros(1, 3, 300, dtype=torch.float32, device=device)
    x = torch.zeros(1, 1, 2, 300, device=device)
    with_keys = dense_problem(x, x, x, relative=tk.relative_keys(keys, lowest=-1))
    with target.override_chip(CHIPS["sm80"]):
        assert reasons(problem(device, 300, torch.float32)) == []
        assert "torch.float32 with relative_keys: no tile fits the 163 KiB" in reasons(with_keys)[0]
    assert any("513" in reason for reason in reasons(problem(device, 513)))
    assert any("float64" in reason for reason in reasons(problem(device, 8, torch.float64)))


def test_explain_names_chip_and_tile(device: torch.device) -> None:
    x = torch.zeros(1, 1, 2, 64, device=device)
    text = str(tk.explain(x, x, x, backend="triton"))
    assert "runs: triton (backends/triton, " in text
    tile = config.tile("forward", target.chip(device), 4, 64)
    assert tile is not None
    assert f"forward tile {tile.block_m} x {tile.block_n}" in text
    mask = tk.Mask.dense(torch.ones(2, 2, dtype=torch.bool, device=device))
    text = str(tk.explain(x.half(), x.half(), x.half(), mask=mask, backend="triton"))
    tile = config.tile("forward", target.chip(device), 2, 64, score_bytes=1)
    assert tile is not None
    assert f"forward tile {tile.block_m} x {tile.block_n}" in text


def test_an_interpreter_that_rounds_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "INTERPRETED", True)
    monkeypatch.setattr(target, "interpreter_rounds_as_a_gpu", False)
    reason = target.reason_against(torch.device("cpu"))
    assert reason is not None
    assert reason.startswith("TRITON_INTERPRET is set")
