"""Offline compilation of every tile for GPUs that are not present, with resource usage.

The launch code is the real one, on meta tensors. A stub driver reports the target chip to Triton,
and Triton's pre-compilation hook compiles the kernel, records its resources and skips the launch.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch

from ...masks.mask import Mask
from ...problem import Saved
from ...problem.cache import cache_problem
from ...problem.dense import dense_problem
from ...scores.relative import relative_bias, relative_keys
from . import config, target
from .config import CHIPS, WIDTHS, Chip, Kernel

DTYPES = (torch.bfloat16, torch.float32)
TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm86": ("cuda", 86, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx9": ("hip", "gfx942", 64),
}
"""Arguments of Triton's `GPUTarget` for each chip: backend, architecture, threads per warp."""


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel on one chip.

    `spills` counts instructions that store registers to local memory or load them back.
    """

    chip: str
    kernel: str
    dtype: str
    columns: int
    tile: str
    warps: int
    stages: int
    shared_kib: float
    registers: int
    spills: int
    spills_in_loops: int
    seconds: float


Constants = dict[tuple[int, ...], Any]
"""Compile-time constants by the position of the argument, and of the field if it is a tuple"""


@dataclass(frozen=True)
class Suite:
    """Kernels of the report: those of attention, or of linear attention."""

    has_tile: Callable[[Chip, torch.dtype, int], bool]
    """True if calls of this dtype and width have a tile on the chip"""
    launch: Callable[[torch.dtype, int], None]
    """launches every kernel on meta tensors of this dtype and width"""
    name: Callable[[Any, Constants], str]
    """name of a kernel in the report"""
    tile: Callable[[Any, Constants], str]
    """tile of a kernel in the report"""


def compile_tiles(
    suite: Suite,
    chips: tuple[str, ...] = tuple(CHIPS),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    widths: tuple[int, ...] = WIDTHS,
    *,
    processes: int = 2,
) -> Iterator[Compiled]:
    """Compiles every kernel of a suite.

    Args:
        suite: `ATTENTION`, or `LINEAR` of linear/triton/report.py.
        chips: names in `config.CHIPS`.
        dtypes: dtypes of q, k and v.
        widths: head dimensions; combinations without a tile are skipped.
        processes: number of worker processes.

    Yields:
        One `Compiled` per kernel, chip, dtype and width.

    Raises:
        RuntimeError: Triton's interpreter is on (TRITON_INTERPRET=1).
    """
    if target.INTERPRETED:
        raise RuntimeError("Triton's interpreter is on: unset TRITON_INTERPRET to compile")
    jobs = [
        (suite, chip, dtype, columns)
        for chip in chips
        for dtype in dtypes
        for columns in widths
        if suite.has_tile(CHIPS[chip], dtype, columns)
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for results in pool.map(_compile_call, jobs):
            yield from results


def _compile_call(job: tuple[Suite, str, torch.dtype, int]) -> list[Compiled]:
    import triton

    suite, chip, dtype, columns = job
    results: dict[str, Compiled] = {}

    def compile_instead(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        name = suite.name(fn.jit_function, compile["constants"])
        if name not in results:
            results[name] = _compile(suite, chip, fn.jit_function, compile, dtype, columns)
        return True

    # Runs in a worker process, so these globals are not restored.
    triton.runtime.driver.set_active(Driver(chip))
    triton.knobs.runtime.jit_cache_hook = compile_instead
    with target.override_chip(CHIPS[chip]):
        suite.launch(dtype, columns)
    return list(results.values())


class Driver:
    """Stub of a Triton driver, with the methods that Triton calls before compilation."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGETS[self.chip])

    def get_current_device(self) -> str:
        return self.chip  # Triton caches kernels by device

    def get_current_stream(self, _: object) -> int:
        return 0


def _has_tile(chip: Chip, dtype: torch.dtype, columns: int) -> bool:
    return config.tile("bwd_dkdv", chip, dtype.itemsize, columns) is not None


def _launch_all(dtype: torch.dtype, columns: int) -> None:
    """Launches a causal forward and backward pass, one with relative keys, the gradients of biases,
    and decoding."""
    from . import launch

    q, k, v = (torch.empty(2, 8, 1024, columns, dtype=dtype, device="meta") for _ in range(3))
    bias = torch.empty(8, 1024, 1024, dtype=dtype, device="meta")
    relative = relative_bias(torch.empty(8, 257, device="meta"), lowest=-128)
    keys = relative_keys(torch.empty(8, 257, columns, dtype=dtype, device="meta"), lowest=-128)

    def prepare(**biases: Any) -> launch.Pass:
        return launch.prepare(dense_problem(q, k, v, mask=Mask.causal(), **biases), q, k, v)

    plain = prepare()
    o, row_stats, _ = launch.forward(plain)
    operands = launch.prepare_backward(plain, q, None, Saved(q, k, v, o, row_stats, None))
    launch.bwd_dkdv(plain, operands, None)
    launch.bwd_dq(plain, operands, None)
    if config.tile("keys_dkdv", target.chip(q.device), dtype.itemsize, columns) is not None:
        with_keys = prepare(relative=keys)
        launch.forward(with_keys)
        launch.bwd_dkdv(with_keys, operands, None)
        launch.bwd_dq(with_keys, operands, None)
        launch.gradient_of_relative_keys(with_keys, operands, None)
    launch.gradient_of_bias(prepare(bias=bias), operands, None, row_stats[0])
    launch.gradient_of_relative_bias(prepare(relative=relative), operands, None)
    _launch_decoding(dtype, columns)


def _launch_decoding(dtype: torch.dtype, columns: int) -> None:
    """Launches decoding for tiles of the largest size, from a contiguous cache, pages and int8."""
    from . import launch

    q = torch.empty(2, 8, 8, columns, dtype=dtype, device="meta")
    cache = torch.empty(64, 1, 64, columns, dtype=dtype, device="meta")
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    scale = torch.empty(64, 1, 64, device="meta")
    contiguous = torch.empty(2, 1, 4096, columns, dtype=dtype, device="meta")
    table = torch.empty(2, 64, dtype=torch.int32, device="meta")
    for k, pages, scales in (
        (contiguous, None, None),
        (cache, table, None),
        (cache.to(torch.int8), table, scale),
    ):
        problem = cache_problem(q, k, k, lengths, pages, k_scale=scales, v_scale=scales)
        launch.decode(launch.prepare(problem, q, k, k))


def compile_for(chip: str, kernel: Any, request: dict[str, Any]) -> Any:
    """Returns Triton's compiled kernel for a chip.

    `kernel` and `request` are the arguments `fn.jit_function` and `compile` of Triton's
    pre-compilation hook.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, request["signature"], request["constants"], request["configs"][0])
    options = {name: request[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    return triton.compile(source, target=GPUTarget(*TARGETS[chip]), options=options)


def _compile(
    suite: Suite, chip: str, kernel: Any, request: dict[str, Any], dtype: torch.dtype, columns: int
) -> Compiled:
    start = time.perf_counter()
    compiled = compile_for(chip, kernel, request)
    seconds = time.perf_counter() - start
    read = _read_cubin if "cubin" in compiled.asm else _read_amdgcn
    registers, spills, in_loops = read(compiled.asm)
    return Compiled(
        chip=chip,
        kernel=suite.name(kernel, request["constants"]),
        dtype=str(dtype).removeprefix("torch."),
        columns=columns,
        tile=suite.tile(kernel, request["constants"]),
        warps=compiled.metadata.num_warps,
        stages=compiled.metadata.num_stages,
        shared_kib=compiled.metadata.shared / 1024,
        registers=registers,
        spills=spills,
        spills_in_loops=in_loops,
        seconds=seconds,
    )


def _name(kernel: Any, constants: Constants) -> str:
    """Returns the kernel's name in `config.Kernel`, or that of its function."""
    from .kernels.cache import Cache
    from .kernels.scores import Scores

    name: str = kernel.__name__.removesuffix("_kernel")
    names: list[str] = kernel.arg_names
    if "scores" not in names:
        return name

    def has(argument: str, fields: tuple[str, ...], field: str) -> bool:
        return (names.index(argument), fields.index(field)) not in constants

    if name == "decode":
        pages = ", pages" if has("cache", Cache._fields, "table") else ""
        return name + pages + (", int8" if has("cache", Cache._fields, "k_scale") else "")
    has_keys = has("scores", Scores._fields, "relative_keys")
    return config.WITH_KEYS.get(cast(Kernel, name), name) if has_keys else name


def _tile(kernel: Any, constants: Constants) -> str:
    """Returns BLOCK_M x BLOCK_N, fields of the argument `sizes`, or BLOCK_M alone."""
    from .kernels.arguments import Sizes

    names: list[str] = kernel.arg_names
    if "sizes" not in names:
        return str(constants[(names.index("BLOCK_M"),)])
    fields = (Sizes._fields.index(name) for name in ("BLOCK_M", "BLOCK_N"))
    return " x ".join(str(constants[names.index("sizes"), field].value) for field in fields)


ATTENTION = Suite(_has_tile, _launch_all, _name, _tile)
"""A causal call, one with relative keys, the gradients of biases, and decoding"""


def _read_cubin(asm: dict[str, Any]) -> tuple[int, int, int]:
    """Returns (registers, spills, spills inside innermost loops) of the assembled code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(asm["cubin"])
        usage = cuobjdump("-res-usage", file.name)
        listing = cuobjdump("-sass", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    code = [
        (int(address, 16), text)
        for address, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.M)
    ]
    spills = [address for address, text in code if re.search(r"\b(LDL|STL)\b", text)]
    loops = [
        (int(jump[1], 16), address)
        for address, text in code
        if (jump := re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)) and int(jump[1], 16) < address
    ]
    inside = [s for s in spills if any(first <= s <= last for first, last in _innermost(loops))]
    return int(registers[1]), len(spills), len(inside)


def _innermost(loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [
        one
        for one in loops
        if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in loops)
    ]


def cuobjdump(*arguments: str) -> str:
    """Returns the output of the program, which Triton contains."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    run = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def _read_amdgcn(asm: dict[str, Any]) -> tuple[int, int, int]:
    """Like `_read_cubin`; AMD's metadata has one spill count, without locations."""

    def count(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"])
        assert found is not None, name
        return int(found[1])

    return count("vgpr_count"), count("vgpr_spill_count"), count("vgpr_spill_count")
