"""Times the tiles of the Triton kernels. A line has a tile in the notation of the table in
transformer_kernels/backends/triton/config.py, and the median time of one full plus one causal call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends.triton import config, target
from transformer_kernels.backends.triton.config import Kernel, Tile
from transformer_kernels.bench import Budget, Interleaver, clock_for
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem import Saved
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.scores.relative import Relative, relative_bias, relative_keys

KERNELS: tuple[Kernel, ...] = ("forward", "bwd_dkdv", "bwd_dq", *config.SQUARE)
DTYPES = ("bfloat16", "float16", "float32")
Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]


class Shape(NamedTuple):
    """Sizes of the timed calls."""

    B: int
    H: int
    S: int
    D: int


class Result(NamedTuple):
    """A tile and its time."""

    tile: Tile
    median_ms: float | None
    """None if it cannot run, or its results are wrong"""
    reason: str = ""

    def __str__(self) -> str:
        m, n, warps, stages = vars(self.tile).values()
        text = self.reason if self.median_ms is None else f"{self.median_ms:8.3f} ms"
        return f"{f'({m}, {n}, {warps}, {stages})':18}  {text}"


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
    return 16 <= (accumulators + scores) / (32 * tile.warps) <= 224


def tune(
    kernel: Kernel,
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    *,
    tiles: Sequence[Tile] | None = None,
    seconds: float = 5.0,
) -> Iterator[Result]:
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
    tiles = tiles or candidates(kernel, device, dtype.itemsize, shape.D)
    if device.type == "cuda":
        compile_ahead(kernel, dtype, shape, device, tiles)
    runnable: list[Tile] = []
    for tile in tiles:
        if (reason := _rejection(kernel, tile, run, expected)) is not None:
            yield Result(tile, None, reason)
        else:
            runnable.append(tile)
    first = _times(kernel, run, runnable, device, seconds / 2)
    half = [result.tile for result in first[: -(-len(first) // 2)]]
    yield from _times(kernel, run, half, device, seconds)


def _with_tile(kernel: Kernel, tile: Tile, run: Run) -> Outputs:
    with config.override_tile(kernel, tile):
        return run()


def _rejection(kernel: Kernel, tile: Tile, run: Run, expected: Outputs) -> str | None:
    """Returns the reason why a tile fails or differs from `expected`; None if it is right."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        results = _with_tile(kernel, tile, run)
    except (CompilationError, OutOfResources, PTXASError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for got, other in zip(results, expected, strict=True):
        largest = float(other.abs().max())
        error_size = float((got.float() - other.float()).abs().max())
        if not error_size <= 8 * torch.finfo(other.dtype).eps * largest:
            return f"WRONG: error {error_size:.3g}, largest value {largest:.3g}"
    return None


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
        _rejection(kernel, tile, run, expected)


def _times(
    kernel: Kernel, run: Run, tiles: Sequence[Tile], device: torch.device, seconds: float
) -> list[Result]:
    """Times tiles in turns; fastest first."""

    def prepare(tile: Tile) -> Callable[[], Run]:
        return lambda: lambda: _with_tile(kernel, tile, run)

    workloads = {str(tile): prepare(tile) for tile in tiles}
    timings = Interleaver(workloads, clock=clock_for(device)).run(Budget(seconds))
    results = [Result(tile, timings[str(tile)].median_ms) for tile in tiles]
    return sorted(results, key=lambda result: result.median_ms or 0.0)


def _kernel_alone(kernel: Kernel, dtype: torch.dtype, shape: Shape, device: torch.device) -> Run:
    """Returns a function that runs one kernel for a full and a causal call, on normal inputs."""
    from transformer_kernels.backends.triton import launch

    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    relative: Relative | None = None
    if kernel == "relative_gradient":
        relative = relative_bias(torch.zeros(shape.H, 1, device=device), lowest=0)
    elif kernel in config.SQUARE:
        keys = torch.randn(shape.H, 2 * shape.S - 1, shape.D, generator=generator)
        relative = relative_keys(keys.to(device, dtype), lowest=1 - shape.S)
    prepared = []
    for mask in (None, Mask.causal()):
        call = launch.prepare(dense_problem(q, k, v, mask=mask, relative=relative), q, k, v)
        o, row_stats, _ = launch.forward(call)
        saved = Saved(q, k, v, o, row_stats, None)
        prepared.append((call, launch.prepare_backward(call, do, None, saved)))

    def run() -> Outputs:
        results: list[Tensor] = []
        for call, operands in prepared:
            match kernel:
                case "forward" | "keys_forward":
                    results += launch.forward(call)[:2]
                case "bwd_dkdv" | "keys_dkdv":
                    results += launch.bwd_dkdv(call, operands, None)
                case "relative_gradient":
                    results.append(launch.gradient_of_relative_bias(call, operands, None))
                case "keys_gradient":
                    results.append(launch.gradient_of_relative_keys(call, operands, None))
                case _:
                    results.append(launch.bwd_dq(call, operands, None))
        return tuple(results)

    return run


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, kind, choices, default in (
        ("kernel", str, KERNELS, "forward, bwd_dkdv, bwd_dq"),
        ("width", int, config.WIDTHS, "64, 128"),
        ("dtype", str, DTYPES, "bfloat16"),
    ):
        help_text = f"can be repeated (default: {default})"
        parser.add_argument(
            f"--{name}", type=kind, choices=choices, action="append", help=help_text
        )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kernel (%(default)s)")


def run(args: argparse.Namespace) -> None:
    device = torch.device("cuda")
    if (reason := target.reason_against(device)) is not None:
        sys.exit(f"tuning needs a GPU that Triton can run on: {reason}")
    for name, width, kernel in product(
        args.dtype or DTYPES[:1], args.width or (64, 128), args.kernel or KERNELS[:3]
    ):
        print(f"{target.chip(device).name} {kernel} {name} {width}", flush=True)
        # 16k tokens in sequences of 4096, with H * D = 2048.
        shape = Shape(B=4, H=max(1, 2048 // width), S=4096, D=width)
        for result in tune(kernel, getattr(torch, name), shape, device, seconds=args.seconds):
            print(f"  {result}", flush=True)
