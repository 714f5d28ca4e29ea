"""Tile tuning: times every tile of a Triton kernel on the GPU of this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..backends.triton import config, target
from ..backends.triton.config import Kernel, Tile
from ..masks.mask import Mask
from ..problem import Saved
from ..problem.dense import dense_problem
from ..scores.relative import Relative, relative_bias, relative_keys
from .clocks import clock_for
from .timer import Budget, Interleaver

KERNELS: tuple[Kernel, ...] = ("forward", "bwd_dkdv", "bwd_dq", *config.SQUARE)
Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]


@dataclass(frozen=True)
class Shape:
    """(B, H, S, D) of the timed calls, one full and one causal."""

    B: int
    H: int
    S: int
    D: int


@dataclass(frozen=True)
class Timed:
    """A tile and the median time of one full plus one causal pass."""

    tile: Tile
    median_ms: float

    def __str__(self) -> str:
        return f"{_row(self.tile)}  {self.median_ms:8.3f} ms"


@dataclass(frozen=True)
class Rejected:
    """A tile that cannot run or whose results are wrong, with the reason."""

    tile: Tile
    reason: str

    def __str__(self) -> str:
        return f"{_row(self.tile)}  {self.reason}"


def _row(tile: Tile) -> str:
    """The tile in the notation of config.py."""
    return f"({tile.block_m}, {tile.block_n}, {tile.warps}, {tile.stages})".ljust(18)


def shape_for(D: int) -> Shape:
    """Returns a shape of 16k tokens in sequences of 4096, with H * D = 2048."""
    return Shape(B=4, H=max(1, 2048 // D), S=4096, D=D)


def candidates(kernel: Kernel, device: torch.device, element_size: int, D: int) -> list[Tile]:
    """Returns the default tile and every other one that fits the device's shared memory and
    registers."""
    chip, columns = target.chip(device), config.width(D)
    default = config.tile(kernel, chip, element_size, columns)
    sides, warps, stages = (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)
    found = [] if default is None else [default]
    score_bytes = 4 if kernel == "relative_gradient" else 0
    for tile in (Tile(*numbers) for numbers in product(sides, sides, warps, stages)):
        if not config.is_allowed(kernel, tile):
            continue
        kib = config.shared_bytes(kernel, chip, tile, element_size, columns, score_bytes) / 1024
        if kib <= chip.shared_kib and _fits_registers(kernel, tile, columns) and tile not in found:
            found.append(tile)
    return found


def _fits_registers(kernel: Kernel, tile: Tile, columns: int) -> bool:
    """True if accumulators and scores fit a thread's 255 registers, and no warp idles."""
    scores = tile.block_m * tile.block_n
    is_dkdv = kernel in ("bwd_dkdv", "keys_dkdv")
    accumulators = (2 * tile.block_n if is_dkdv else tile.block_m) * columns
    if kernel == "relative_gradient":
        accumulators = scores
    per_thread = (accumulators + scores) / (32 * tile.warps)
    return 16 <= per_thread <= 224


def tune(
    kernel: Kernel,
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    *,
    tiles: list[Tile] | None = None,
    seconds: float = 5.0,
) -> Iterator[Timed | Rejected]:
    """Times the tiles of one kernel.

    Each tile is first compared with the default one and rejected if results differ by more than
    rounding. All remaining tiles are then timed, interleaved; the faster half is timed again.

    Args:
        kernel: name of the kernel.
        dtype: dtype of q, k and v.
        shape: sizes of the timed calls.
        device: a GPU, or the CPU with Triton's interpreter.
        tiles: tiles to try; `candidates` by default.
        seconds: time budget of the second timing; the first gets half.

    Yields:
        Rejected tiles as they occur, then the faster half of the others, fastest first.
    """
    run = _kernel_alone(kernel, dtype, shape, device)
    expected = run()
    runnable: dict[Tile, Run] = {}
    tiles = tiles or candidates(kernel, device, dtype.itemsize, shape.D)
    if device.type == "cuda":
        compile_ahead(kernel, dtype, shape, device, tiles)
    for tile in tiles:
        attempt = _attempt(kernel, tile, run, expected)
        if isinstance(attempt, Rejected):
            yield attempt
        else:
            runnable[tile] = attempt
    first = _times(runnable, device, seconds / 2)
    fastest = sorted(first, key=first.__getitem__)
    half = fastest[: -(-len(fastest) // 2)]
    second = _times({tile: runnable[tile] for tile in half}, device, seconds)
    for tile in sorted(second, key=second.__getitem__):
        yield Timed(tile, second[tile])


def _attempt(kernel: Kernel, tile: Tile, run: Run, expected: Outputs) -> Run | Rejected:
    """Returns the kernel with this tile, or the reason why it fails or differs from `expected`."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    def run_with_tile() -> Outputs:
        with config.override_tile(kernel, tile):
            return run()

    try:
        results = run_with_tile()
    except (CompilationError, OutOfResources, PTXASError, RuntimeError) as error:
        return Rejected(tile, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    for got, other in zip(results, expected, strict=True):
        largest = float(other.abs().max())
        error_size = float((got.float() - other.float()).abs().max())
        if not error_size <= 8 * torch.finfo(other.dtype).eps * largest:
            return Rejected(tile, f"WRONG: error {error_size:.3g}, largest value {largest:.3g}")
    return run_with_tile


def compile_ahead(
    kernel: Kernel, dtype: torch.dtype, shape: Shape, device: torch.device, tiles: Sequence[Tile]
) -> list[BaseException]:
    """Compiles the tiles into Triton's disk cache with one process per CPU.

    A tile takes seconds to compile. One that fails here fails again when it is timed and is
    reported then.

    Returns:
        Exceptions that terminated a whole process early.
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
    workloads = {name: _prepared(runs[tile]) for name, tile in tiles.items()}
    timings = Interleaver(workloads, clock=clock_for(device)).run(Budget(seconds))
    return {tiles[name]: timing.median_ms for name, timing in timings.items()}


def _prepared(run: Run) -> Callable[[], Run]:
    return lambda: run


def _kernel_alone(kernel: Kernel, dtype: torch.dtype, shape: Shape, device: torch.device) -> Run:
    """Returns a function that runs one kernel for a full and a causal call, on normal inputs."""
    from ..backends.triton import launch

    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(shape.B, shape.H, shape.S, shape.D, generator=generator).to(device, dtype)
        for _ in range(4)
    )
    prepared = []
    relative: Relative | None = None
    if kernel == "relative_gradient":
        relative = relative_bias(torch.zeros(shape.H, 1, device=device), lowest=0)
    elif kernel in config.SQUARE:
        keys = torch.randn(shape.H, 2 * shape.S - 1, shape.D, generator=generator)
        relative = relative_keys(keys.to(device, dtype), lowest=1 - shape.S)
    for mask in (None, Mask.causal()):
        call = launch.prepare(dense_problem(q, k, v, mask=mask, relative=relative), q, k, v)
        o, row_stats, _ = launch.forward(call)
        saved = Saved(q, k, v, o, row_stats, None)
        prepared.append((call, launch.prepare_backward(call, do, None, saved)))

    def run() -> Outputs:
        results: list[Tensor] = []
        for call, operands in prepared:
            if kernel in ("forward", "keys_forward"):
                results += launch.forward(call)[:2]
            elif kernel in ("bwd_dkdv", "keys_dkdv"):
                results += launch.bwd_dkdv(call, operands, None)
            elif kernel == "relative_gradient":
                results.append(launch.gradient_of_relative_bias(call, operands, None))
            elif kernel == "keys_gradient":
                results.append(launch.gradient_of_relative_keys(call, operands, None))
            else:
                results.append(launch.bwd_dq(call, operands, None))
        return tuple(results)

    return run
