"""Mutation tests of the CUDA kernels: removing a barrier or a wait must make a test case fail.

Each mutant is a separate library in a separate process, because a process can register an operator
only once.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from building.emulated import Emulation
from building.extension import LINK_FLAGS
from building.host import COMMON_FLAGS
from building.tools import find_compiler, find_torch
from tests.support import emulator
from tests.support.edits import Edit

ROOT = Path(__file__).parents[3]
RACE_CHECKED = Emulation(races=True)
_PROCESSES = multiprocessing.get_context("forkserver")
"""The fork server has imported torch already, which takes longer than running a mutant."""
_PROCESSES.set_forkserver_preload(["tests.csrc.cuda.run_mutant"])
DECODING, PACKED, LINEAR = "decoding: ", "packed: ", "linear: "
"""Prefixes of the names of cases of attention_decode, attention_varlen and linear_attention."""
STEPS = "steps"
"""The case of linear_attention_decode, in float32 at width 128."""


@dataclass(frozen=True)
class Mutant:
    """A change of one source of csrc/cuda, and test cases that must all fail."""

    name: str
    source: str
    old: str
    new: str
    cases: tuple[str, ...]
    dtype: str = "float16"
    variant: str = "half-32"
    """Element type and width of the kernels that are recompiled, and that the cases run."""
    deterministic: bool = False
    chip: int = 80
    """Emulated compute capability: 80 or 90."""
    aimed_ctas: int = 0
    """Number of CTAs that launches aim at; 0: their own number."""

    def __str__(self) -> str:
        return self.name


def mutated(mutant: Mutant) -> str:
    """The text of the mutated source."""
    edit = Edit(mutant.source, mutant.old, mutant.new)
    return edit.apply((ROOT / "csrc/cuda" / mutant.source).read_text())


def build(mutant: Mutant, folder: Path) -> Path:
    """Builds a library of all kernels in which the unit of `mutant.variant` is mutated."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    changed = folder / "csrc/cuda" / mutant.source
    changed.write_text(mutated(mutant))

    torch, compiler = find_torch(), find_compiler(os.environ)
    units = RACE_CHECKED.units(torch, ROOT)
    (index,) = (n for n, unit in enumerate(units) if unit.variant == mutant.variant)
    unchanged = emulator.build(RACE_CHECKED).parent
    objects = [unchanged / unit.object_name for unit in units]
    source = folder / units[index].source
    objects[index] = folder / "kernels.o"
    # A mutant runs for a second or two: optimisation would take longer than it saves.
    flags = (*COMMON_FLAGS, *units[index].flags, "-fsanitize=thread", "-O0", "-c")
    _run([*compiler, *flags, str(source), "-o", str(objects[index])], folder)
    library = folder / "mutant.so"
    link = (f"-L{torch.root / 'lib'}", *LINK_FLAGS, "-ldl")
    _run([*compiler, *map(str, objects), "-o", str(library), *link], folder)
    return library


def _run(command: Sequence[str], folder: Path) -> None:
    """Runs a command in `folder`, whose csrc/ includes are relative to."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def assert_right(same: Mutant, folder: Path) -> None:
    """Asserts that a mutant without a change passes all of its cases."""
    assert set(errors(same, build(same, folder))) == {"ok"}


def assert_noticed(mutant: Mutant, folder: Path) -> None:
    """Asserts that the mutant fails all of its cases under every schedule."""
    lines = errors(mutant, build(mutant, folder))
    shutil.rmtree(folder)
    print(*lines, sep="\n")
    assert "ok" not in lines


def errors(mutant: Mutant, library: Path) -> list[str]:
    """Runs the cases under several schedules. Returns "ok" or an error message for each run."""
    from tests.csrc.cuda.run_mutant import send_outcomes

    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=send_outcomes, args=(sender, str(library), mutant))
    process.start()
    sender.close()
    try:
        lines: list[str] = receiver.recv()
    except EOFError:
        lines = []
    process.join()
    assert lines, f"the process of {mutant} ended with exit code {process.exitcode}"
    return lines
