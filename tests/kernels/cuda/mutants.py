"""Mutants of the CUDA kernels (mutants.toml): libraries built with one, and the cases they run.

Each mutant is a separate library in a separate process, because a process can register an operator
only once.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from building.emulated import Emulation
from building.extension import LINK_FLAGS, ROOT
from building.host import COMMON_FLAGS
from building.tools import find_compiler, find_torch
from tests.kernels.cuda.hopper_cases import HOPPER_CASES, HOPPER_VARLEN
from tests.support import emulator
from tests.support.case import AnyCase, assert_case
from tests.support.cases import CASES
from tests.support.decode_cases import DECODE_CASES
from tests.support.linear import LINEAR_CASES, steps_case
from tests.support.varlen_cases import VARLEN_CASES
from transformer_kernels.dispatch.operators import register_attention
from transformer_kernels.linear.attention import LINEAR
from transformer_kernels.linear.registration import register_compiled

RACE_CHECKED = Emulation(races=True)
STEPS = "steps"
"""The case of linear_attention_decode, in float32 at width 128."""
SCHEDULES = (0, 1, 2)
_PROCESSES = multiprocessing.get_context("forkserver")
"""The fork server has imported torch already, which takes longer than running a mutant."""
_PROCESSES.set_forkserver_preload([__name__])


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one source of csrc/cuda, and test cases that must all fail."""

    name: str
    source: str
    old: str
    new: str
    cases: tuple[str, ...]
    """names; those of attention_decode, attention_varlen and linear_attention have the prefixes
    "decoding: ", "packed: " and "linear: " """
    dtype: str = "float16"
    variant: str = "half-32"
    """element type and width of the kernels that are recompiled, and that the cases run"""
    deterministic: bool = False
    chip: int = 80
    """emulated compute capability: 80 or 90"""
    aimed_ctas: int = 0
    """number of CTAs that launches aim at; 0: their own number"""

    def __str__(self) -> str:
        return f"{self.source}: {self.name}"

    @property
    def original(self) -> str:
        """Text of the source."""
        return (ROOT / "csrc/cuda" / self.source).read_text(encoding="utf-8")

    @property
    def text(self) -> str:
        """Text of the mutated source. Raises ValueError unless it has `old` once."""
        if (count := self.original.count(self.old)) != 1:
            raise ValueError(f"{self.source} has {self.old!r} {count} times, not once")
        return self.original.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """Reads mutants.toml."""
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        groups = tomllib.load(file)["group"]
    return [
        Mutant(name=name, cases=tuple(cases.split(", ")), old=old, new=new, **group)
        for group in groups
        for name, (cases, old, new) in group.pop("mutants").items()
    ]


def outcomes(mutant: Mutant, folder: Path) -> list[str]:
    """Runs the cases under several schedules. Returns "ok" or an error message for each run."""
    library = _build(mutant, folder)
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_send_outcomes, args=(sender, str(library), mutant))
    process.start()
    sender.close()
    try:
        lines: list[str] = receiver.recv()
    except EOFError:
        lines = []
    process.join()
    shutil.rmtree(folder)
    assert lines, f"the process of {mutant} ended with exit code {process.exitcode}"
    return lines


def _build(mutant: Mutant, folder: Path) -> Path:
    """Builds a library of all kernels in which the unit of `mutant.variant` is mutated."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / "csrc/cuda" / mutant.source).write_text(mutant.text, encoding="utf-8")
    compiler = find_compiler(os.environ)
    torch_package = find_torch()
    units = RACE_CHECKED.units(torch_package, ROOT)
    (index,) = (n for n, unit in enumerate(units) if unit.variant == mutant.variant)
    unchanged = emulator.build(RACE_CHECKED).parent
    objects = [unchanged / unit.object_name for unit in units]
    source = folder / units[index].source
    objects[index] = folder / "kernels.o"
    # A mutant runs for a second or two: optimisation would take longer than it saves.
    flags = (*COMMON_FLAGS, *units[index].flags, "-fsanitize=thread", "-O0", "-c")
    _run([*compiler, *flags, str(source), "-o", str(objects[index])], folder)
    library = folder / "mutant.so"
    link = (f"-L{torch_package.root / 'lib'}", *LINK_FLAGS, "-ldl")
    _run([*compiler, *map(str, objects), "-o", str(library), *link], folder)
    return library


def _run(command: Sequence[str], folder: Path) -> None:
    """Runs a command in `folder`, whose csrc/ includes are relative to."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def _send_outcomes(sender: Connection, library: str, mutant: Mutant) -> None:
    """Loads the library, and sends one line for each case and schedule."""
    torch.ops.load_library(library)
    register_attention(RACE_CHECKED.library)
    register_compiled(LINEAR, RACE_CHECKED.library)
    emulator.emulate(RACE_CHECKED.library)
    operators = getattr(torch.ops, RACE_CHECKED.library)
    operators.report_races(True)
    operators.want_poison(True)
    operators.set_aimed_ctas(mutant.aimed_ctas)
    torch.use_deterministic_algorithms(mutant.deterministic)
    every: dict[str, AnyCase] = {STEPS: steps_case(20, 100)}
    every |= {case.name: case for case in (*CASES, *HOPPER_CASES)}
    every |= {f"decoding: {case.name}": case for case in DECODE_CASES}
    every |= {f"packed: {case.name}": case for case in (*VARLEN_CASES, *HOPPER_VARLEN)}
    every |= {f"linear: {case.name}": case for case in LINEAR_CASES}
    lines = []
    for name in mutant.cases:
        for seed in SCHEDULES:
            with emulator.schedule(seed), emulator.chip(mutant.chip):
                lines.append(_outcome(every[name], getattr(torch, mutant.dtype)))
    sender.send(lines)


def _outcome(case: AnyCase, dtype: torch.dtype) -> str:
    try:
        assert_case(case, dtype, "cuda")
    except (AssertionError, RuntimeError) as error:
        return " ".join(str(error).split())
    return "ok"
