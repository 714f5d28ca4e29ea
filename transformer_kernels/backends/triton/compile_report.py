"""Compiles every tile for chips that are not here, and reads what became of it.

The launches are the real ones, on tensors without data. Triton is given a driver that names the
chip, and its hook before a compilation takes over: it compiles, notes, and launches nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends.triton import config, interpreter, target
from transformer_kernels.backends.triton.config import CHIPS, WIDTHS
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem import SavedForBackward
from transformer_kernels.problem.attention import build_problem

DTYPES = (torch.bfloat16, torch.float32)
TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm86": ("cuda", 86, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx9": ("hip", "gfx942", 64),
}
"""Triton's names of the chips: backend, architecture, threads a warp."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one chip. Spills are instructions that move registers to memory or back."""

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


def compile_tiles(
    chips: tuple[str, ...] = tuple(CHIPS),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    widths: tuple[int, ...] = WIDTHS,
    *,
    processes: int = 2,
) -> Iterator[Compiled]:
    """Every kernel of a causal call with a dense bias, for each chip, dtype and width it can take.

    Raises RuntimeError where Triton's interpreter is on, which has no kernels to compile.
    """
    if interpreter.is_on():
        raise RuntimeError("Triton's interpreter is on: unset TRITON_INTERPRET to compile")
    jobs = [
        (chip, dtype, columns)
        for chip in chips
        for dtype in dtypes
        for columns in widths
        if config.tile("bwd_dkdv", CHIPS[chip], dtype.itemsize, columns) is not None
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for results in pool.map(_compile_call, jobs):
            yield from results


def _compile_call(job: tuple[str, torch.dtype, int]) -> list[Compiled]:
    import triton

    chip, dtype, columns = job
    results: list[Compiled] = []

    def compile_instead(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        results.append(_compile(chip, fn.jit_function, compile, dtype, columns))
        return True

    # In a process of its own: nothing needs to be put back.
    triton.runtime.driver.set_active(Driver(chip))
    triton.knobs.runtime.jit_cache_hook = compile_instead
    with target.pretend(CHIPS[chip]):
        _launch_all(dtype, columns)
    return results


class Driver:
    """What Triton asks of a driver before it has compiled."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGETS[self.chip])

    def get_current_device(self) -> str:
        return self.chip  # Triton keeps kernels by device

    def get_current_stream(self, _: object) -> int:
        return 0


def _launch_all(dtype: torch.dtype, columns: int) -> None:
    """A causal pass, forward and backward; and the gradient of a dense bias."""
    from transformer_kernels.backends.triton import launch

    q, k, v = (torch.empty(2, 8, 1024, columns, dtype=dtype, device="meta") for _ in range(3))
    bias = torch.empty(8, 1024, 1024, dtype=dtype, device="meta")

    def prepare(bias: Tensor | None) -> launch.Call:
        problem, tensor_args = build_problem(
            q, k, v, Mask.causal(), bias, None, None, 0.0, None, None
        )
        return launch.prepare(q, k, v, tensor_args, problem)

    plain, biased = prepare(None), prepare(bias)
    o, lse, _ = launch.forward(plain)
    operands = launch.prepare_backward(plain, q, None, SavedForBackward(q, k, v, o, lse, None))
    launch.bwd_dkdv(plain, operands, None)
    launch.bwd_dq(plain, operands, None)
    launch.gradient_of_bias(biased, operands, None, lse)


def compile_for(chip: str, kernel: Any, what: dict[str, Any]) -> Any:
    """Triton's compiled kernel. `kernel` and `what` are what its hook before compilation is given,
    as `fn.jit_function` and `compile`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, what["signature"], what["constants"], what["configs"][0])
    options = {"num_warps": what["num_warps"], "num_stages": what["num_stages"]}
    return triton.compile(source, target=GPUTarget(*TARGETS[chip]), options=options)


def _compile(
    chip: str, kernel: Any, what: dict[str, Any], dtype: torch.dtype, columns: int
) -> Compiled:
    start = time.perf_counter()
    made = compile_for(chip, kernel, what)
    seconds = time.perf_counter() - start
    read = _read_cubin if "cubin" in made.asm else _read_amdgcn
    registers, spills, in_loops = read(made.asm)
    sizes = {name: what["constants"].get((at,)) for at, name in enumerate(kernel.arg_names)}
    return Compiled(
        chip=chip,
        kernel=kernel.__name__.removesuffix("_kernel"),
        dtype=str(dtype).removeprefix("torch."),
        columns=columns,
        tile=" x ".join(str(sizes[name]) for name in ("BLOCK_M", "BLOCK_N") if sizes.get(name)),
        warps=made.metadata.num_warps,
        stages=made.metadata.num_stages,
        shared_kib=made.metadata.shared / 1024,
        registers=registers,
        spills=spills,
        spills_in_loops=in_loops,
        seconds=seconds,
    )


def _read_cubin(asm: dict[str, Any]) -> tuple[int, int, int]:
    """(registers, spills, spills inside loops), as the assembler left them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(asm["cubin"])
        usage = _cuobjdump("-res-usage", file.name)
        listing = _cuobjdump("-sass", file.name)
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


def _cuobjdump(*arguments: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    run = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def _read_amdgcn(asm: dict[str, Any]) -> tuple[int, int, int]:
    """The same; the metadata counts registers that are spilled, not where."""

    def count(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"])
        assert found is not None, name
        return int(found[1])

    return count("vgpr_count"), count("vgpr_spill_count"), count("vgpr_spill_count")
