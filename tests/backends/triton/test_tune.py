"""Tile tuning: candidates, the check before timing, and the results."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.backends.triton import config, target
from transformer_kernels.backends.triton.config import CHIPS, Tile
from transformer_kernels.bench import tune
from transformer_kernels.bench.tune import Rejected, Shape, Timed

CPU = torch.device("cpu")
SMALL = Shape(B=1, H=1, S=37, D=16)


@pytest.mark.parametrize("kernel", tune.KERNELS)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_candidates_fit_the_chip(kernel: config.Kernel, chip: config.Chip) -> None:
    with target.override_chip(chip):
        tiles = tune.candidates(kernel, CPU, 2, 128)
    default = config.tile(kernel, chip, 2, 128)
    assert tiles[0] == default
    if kernel in config.SQUARE:
        assert all(tile.block_m == tile.block_n <= 64 for tile in tiles)
    assert len(set(tiles)) == len(tiles) > (2 if kernel in config.SQUARE else 20)
    for tile in tiles[1:]:
        assert config.shared_bytes(kernel, chip, tile, 2, 128) <= 1024 * chip.shared_kib


def needs_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU `tune` itself runs: tests/gpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_tiles_are_timed_and_sorted(kernel: config.Kernel) -> None:
    needs_the_interpreter()
    tiles = [Tile(64, 64, 4, 1), Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)]
    results = list(tune.tune(kernel, torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01))
    assert all(isinstance(one, Timed) for one in results)
    times = [one.median_ms for one in results if isinstance(one, Timed)]
    assert len(times) == 2  # the faster half
    assert times == sorted(times)
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
    wrong, right = tune.tune("bwd_dq", torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01)
    assert isinstance(wrong, Rejected)
    assert wrong.tile == tiles[0]
    assert wrong.reason.startswith("WRONG: error ")
    assert isinstance(right, Timed)


@pytest.mark.exhaustive
def test_compile_ahead_returns_the_errors_of_its_processes() -> None:
    needs_the_interpreter()
    tiles = [Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)]
    assert tune.compile_ahead("forward", torch.float32, SMALL, CPU, tiles) == []
    nowhere = torch.device("cuda", 99)
    assert len(tune.compile_ahead("forward", torch.float32, SMALL, nowhere, tiles)) > 0


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
    rejected, timed = tune.tune("forward", torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01)
    assert isinstance(rejected, Rejected)
    assert rejected.tile == tiles[0]
    assert "shared memory" in str(rejected)
    assert isinstance(timed, Timed)
    assert timed.tile == tiles[1]


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    needs_the_interpreter()
    assert cli.main(["tune"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
