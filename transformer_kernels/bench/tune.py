"""Which tile is fastest on the GPU that is here, for each of Triton's kernels."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from transformer_kernels.backends.triton import config, target
from transformer_kernels.backends.triton.config import Kernel, Tile
from transformer_kernels.bench.clocks import clock_for
from transformer_kernels.bench.timer import Budget, Interleaver
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem import SavedForBackward
from transformer_kernels.problem.attention import build_problem

KERNELS: tuple[Kernel, ...] = ("forward", "bwd_dkdv", "bwd_dq")
Results = tuple[Tensor, ...]
Run = Callable[[], Results]


@dataclass(frozen=True)
class Shape:
    """(B, H, S, D) of the call that is timed, full and causal."""

    B: int
    H: int
    S: int
    D: int


@dataclass(frozen=True)
class Timed:
    """A tile, and the median of a full and a causal pass together."""

    tile: Tile
    median_ms: float

    def __str__(self) -> str:
        return f"{_row(self.tile)}  {self.median_ms:8.3f} ms"


@dataclass(frozen=True)
class Refused:
    """A tile that cannot run, or whose results are wrong, and why."""

    tile: Tile
    reason: str

    def __str__(self) -> str:
        return f"{_row(self.tile)}  {self.reason}"


def _row(tile: Tile) -> str:
    """As it stands in config.py."""
    return f"({tile.block_m}, {tile.block_n}, {tile.warps}, {tile.stages})".ljust(18)


def shape_for(D: int) -> Shape:
    """16k tokens of 2048 numbers, in sequences of 4096."""
    return Shape(B=4, H=max(1, 2048 // D), S=4096, D=D)


def candidates(kernel: Kernel, device: torch.device, element_size: int, D: int) -> list[Tile]:
    """The shipped tile, and every other that fits the shared memory of the device and whose sums
    fit the registers of its warps."""
    chip, columns = target.chip(device), config.width(D)
    shipped = config.tile(kernel, chip, element_size, columns)
    sides, warps, stages = (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)
    found = [] if shipped is None else [shipped]
    for tile in (Tile(*numbers) for numbers in product(sides, sides, warps, stages)):
        kib = config.shared_bytes(kernel, chip, tile, element_size, columns) / 1024
        if kib <= chip.shared_kib and _fits_registers(kernel, tile, columns) and tile not in found:
            found.append(tile)
    return found


def _fits_registers(kernel: Kernel, tile: Tile, columns: int) -> bool:
    """Sums and scores of a thread, of its 255 registers; and not so few that warps idle."""
    sums = (2 * tile.block_n if kernel == "bwd_dkdv" else tile.block_m) * columns
    each = (sums + tile.block_m * tile.block_n) / (32 * tile.warps)
    return 16 <= each <= 224


def tune(
    kernel: Kernel,
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    *,
    tiles: list[Tile] | None = None,
    seconds: float = 5.0,
) -> Iterator[Timed | Refused]:
    """Refusals as they come, then the tiles that run, fastest first.

    Each is first compared with the shipped one, and refused where it differs by more than rounding;
    then all take turns; the faster half of them takes turns once more.
    """
    run = _kernel_alone(kernel, dtype, shape, device)
    expected = run()
    able: dict[Tile, Run] = {}
    tiles = tiles or candidates(kernel, device, dtype.itemsize, shape.D)
    if device.type == "cuda":
        compile_ahead(kernel, dtype, shape, device, tiles)
    for tile in tiles:
        attempt = _attempt(kernel, tile, run, expected)
        if isinstance(attempt, Refused):
            yield attempt
        else:
            able[tile] = attempt
    first = _times(able, device, seconds / 2)
    fastest = sorted(first, key=first.__getitem__)
    again = _times({tile: able[tile] for tile in fastest[: -(-len(able) // 2)]}, device, seconds)
    for tile in sorted(again, key=again.__getitem__):
        yield Timed(tile, again[tile])


def _attempt(kernel: Kernel, tile: Tile, run: Run, expected: Results) -> Run | Refused:
    """The kernel with this tile, compared with what was expected."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    def run_with_tile() -> Results:
        with config.trying(kernel, tile):
            return run()

    try:
        results = run_with_tile()
    except (CompilationError, OutOfResources, PTXASError, RuntimeError) as error:
        return Refused(tile, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    for got, other in zip(results, expected, strict=True):
        largest = float(other.abs().max())
        error_size = float((got.float() - other.float()).abs().max())
        if not error_size <= 8 * torch.finfo(other.dtype).eps * largest:
            return Refused(tile, f"WRONG: errs by {error_size:.3g} of {largest:.3g}")
    return run_with_tile


def compile_ahead(
    kernel: Kernel, dtype: torch.dtype, shape: Shape, device: torch.device, tiles: Sequence[Tile]
) -> list[BaseException]:
    """Fills Triton's cache on disk by all processors: a tile takes seconds to compile.

    What fails there fails again where it is timed, and is told then; what ended a whole process
    early is returned.
    """
    workers = min(os.cpu_count() or 1, len(tiles))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        shares = [tiles[first::workers] for first in range(workers)]
        runs = [pool.submit(_compile, kernel, dtype, shape, device, share) for share in shares]
        return [error for run in runs if (error := run.exception()) is not None]


def _compile(
    kernel: Kernel, dtype: torch.dtype, shape: Shape, device: torch.device, tiles: Sequence[Tile]
) -> None:
    run = _kernel_alone(kernel, dtype, shape, device)
    expected = run()
    for tile in tiles:
        _attempt(kernel, tile, run, expected)


def _times(runs: dict[Tile, Run], device: torch.device, seconds: float) -> dict[Tile, float]:
    tiles = {str(tile): tile for tile in runs}
    work = {name: _prepared(runs[tile]) for name, tile in tiles.items()}
    timings = Interleaver(work, clock=clock_for(device)).run(Budget(seconds))
    return {tiles[name]: timing.median_ms for name, timing in timings.items()}


def _prepared(run: Run) -> Callable[[], Run]:
    return lambda: run


def _kernel_alone(kernel: Kernel, dtype: torch.dtype, shape: Shape, device: torch.device) -> Run:
    """One full and one causal call of it, on normal numbers."""
    from transformer_kernels.backends.triton import launch

    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(shape.B, shape.H, shape.S, shape.D, generator=generator).to(device, dtype)
        for _ in range(4)
    )
    prepared = []
    for mask in (None, Mask.causal()):
        problem, tensor_args = build_problem(q, k, v, mask, None, None, None, 0.0, None, None)
        call = launch.prepare(q, k, v, tensor_args, problem)
        o, lse, _ = launch.forward(call)
        saved = SavedForBackward(q, k, v, o, lse, None)
        prepared.append((call, launch.prepare_backward(call, do, None, saved)))

    def run() -> Results:
        results: list[Tensor] = []
        for call, operands in prepared:
            if kernel == "forward":
                results += launch.forward(call)[:2]
            elif kernel == "bwd_dkdv":
                results += launch.bwd_dkdv(call, operands, None)
            else:
                results.append(launch.bwd_dq(call, operands, None))
        return tuple(results)

    return run
