"""Tuning of Triton tiles: candidates, the check before timing, and the results."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch

from benchmarks.tuning import triton
from benchmarks.tuning.triton import Shape
from transformer_kernels.backends.triton import config, target
from transformer_kernels.backends.triton.config import CHIPS, Tile

CPU = torch.device("cpu")
SMALL = Shape(B=1, H=1, S=37, D=16)


@pytest.mark.parametrize("kernel", triton.KERNELS)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_candidates_fit_the_chip(kernel: config.Kernel, chip: config.Chip) -> None:
    with target.override_chip(chip):
        tiles = triton.candidates(kernel, CPU, 2, 128)
    default = config.tile(kernel, chip, 2, 128)
    assert tiles[0] == default
    if kernel in config.SQUARE:
        assert all(tile.block_m == tile.block_n <= 64 for tile in tiles)
    assert len(set(tiles)) == len(tiles) > (2 if kernel in config.SQUARE else 20)
    for tile in tiles[1:]:
        assert config.shared_bytes(kernel, chip, tile, 2, 128) <= 1024 * chip.shared_kib


def needs_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the tuning itself runs: tests/gpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", triton.KERNELS)
def test_tiles_are_timed_and_sorted(kernel: config.Kernel) -> None:
    needs_the_interpreter()
    tiles = [Tile(64, 64, 4, 1), Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)]
    results = list(triton.tune(kernel, torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01))
    times = [one.median_ms or 0.0 for one in results]
    assert len(times) == 2  # the faster half
    assert 0.0 < times[0] <= times[1]
    assert {one.tile for one in results} < set(tiles)
    assert str(results[0]).startswith("(")


def test_a_wrong_tile_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_the_interpreter()
    from transformer_kernels.backends.triton import launch

    original = launch.bwd_dq

    def broken(*arguments: object) -> torch.Tensor:
        dq = original(*arguments)  # type: ignore[arg-type]
        default = config.tile("bwd_dq", CHIPS["sm90"], 4, 16)
        return dq if default != Tile(16, 16, 4, 1) else dq * 1.01

    monkeypatch.setattr(launch, "bwd_dq", broken)
    tiles = [Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)]
    wrong, right = triton.tune("bwd_dq", torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01)
    assert (wrong.tile, wrong.median_ms) == (tiles[0], None)
    assert wrong.reason.startswith("WRONG: error ")
    assert right.median_ms is not None


@pytest.mark.exhaustive
def test_compile_ahead_returns_the_errors_of_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_the_interpreter()
    from tests.support import triton_interpreter

    pool = partial(ProcessPoolExecutor, initializer=triton_interpreter.install)
    monkeypatch.setattr(triton, "ProcessPoolExecutor", pool)
    tiles = [Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)]
    assert triton.compile_ahead("forward", torch.float32, SMALL, CPU, tiles) == []
    nowhere = torch.device("cuda", 99)
    assert len(triton.compile_ahead("forward", torch.float32, SMALL, nowhere, tiles)) > 0


def test_a_tile_that_cannot_compile_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_the_interpreter()
    from triton.runtime.errors import OutOfResources

    from transformer_kernels.backends.triton import launch

    original = launch.forward

    def limited(call: launch.Pass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if config.tile("forward", CHIPS["sm90"], 4, 16) == Tile(128, 128, 4, 4):
            raise OutOfResources(300, 200, "shared memory")
        return original(call)

    monkeypatch.setattr(launch, "forward", limited)
    tiles = [Tile(128, 128, 4, 4), Tile(32, 32, 4, 1)]
    rejected, timed = triton.tune("forward", torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01)
    assert (rejected.tile, rejected.median_ms) == (tiles[0], None)
    assert "shared memory" in str(rejected)
    assert timed.tile == tiles[1]
    assert timed.median_ms is not None
