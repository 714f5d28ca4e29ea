"""Kernels with one line less: every barrier and wait must be missed by somebody.

A mutant is a library of its own, because an operator can be registered but once in a process.
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

ROOT = Path(__file__).parents[3]
WATCHED = Emulation(races=True)
_PROCESSES = multiprocessing.get_context("forkserver")
"""They are forked from one that has imported torch, which takes longer than to run a mutant."""
_PROCESSES.set_forkserver_preload(["tests.csrc.cuda.run_mutant"])
DECODING, PACKED = "decoding: ", "packed: "
"""Before the names of cases that are of attention_decode, and of attention_varlen"""


@dataclass(frozen=True)
class Mutant:
    """A change of one source of csrc/cuda, and the cases of which one shows it."""

    name: str
    source: str
    old: str
    new: str
    cases: tuple[str, ...]
    dtype: str = "float16"
    variant: str = "half-32"
    """of the kernels: the one that is compiled anew, and that the cases run"""
    deterministic: bool = False
    chip: int = 80
    """Whose kernels the cases run"""

    def __str__(self) -> str:
        return self.name


def mutated(mutant: Mutant) -> str:
    """The text of its source, changed."""
    text = (ROOT / "csrc/cuda" / mutant.source).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.source} has not one {mutant.old!r}"
    return text.replace(mutant.old, mutant.new)


def build(mutant: Mutant, folder: Path) -> Path:
    """The library of all kernels, that of one element type and width changed."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    changed = folder / "csrc/cuda" / mutant.source
    changed.write_text(mutated(mutant))

    torch, compiler = find_torch(), find_compiler(os.environ)
    units = WATCHED.units(torch, ROOT)
    (index,) = (n for n, unit in enumerate(units) if unit.variant == mutant.variant)
    unchanged = emulator.build(WATCHED).parent
    objects = [unchanged / unit.object_name for unit in units]
    source = folder / units[index].source
    objects[index] = folder / "kernels.o"
    # A mutant runs for a second or two, which no optimisation is worth.
    flags = (*COMMON_FLAGS, *units[index].flags, "-fsanitize=thread", "-O0", "-c")
    _run([*compiler, *flags, str(source), "-o", str(objects[index])], folder)
    library = folder / "mutant.so"
    link = (f"-L{torch.root / 'lib'}", *LINK_FLAGS, "-ldl")
    _run([*compiler, *map(str, objects), "-o", str(library), *link], folder)
    return library


def _run(command: Sequence[str], folder: Path) -> None:
    """`folder` has the csrc/ that includes are relative to."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def assert_right(same: Mutant, folder: Path) -> None:
    """Of one that changes nothing."""
    assert set(errors(same, build(same, folder))) == {"right"}


def assert_noticed(mutant: Mutant, folder: Path) -> None:
    lines = errors(mutant, build(mutant, folder))
    shutil.rmtree(folder)
    print(*lines, sep="\n")
    assert "right" not in lines


def errors(mutant: Mutant, library: Path) -> list[str]:
    """What its cases lead to, under several schedules: a line each, "right" or what is wrong."""
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
    assert lines, f"its process ends with {process.exitcode}"
    return lines
