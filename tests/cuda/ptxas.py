"""What ptxas reported of the kernels that are built: `-Xptxas -v`, kept beside each object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
_KERNEL = re.compile(r"tk4cudaL?\d+(\w+?_kernel)")
_UNIT = re.compile(r"kernels-(\w+)-(\d+)\.o\.ptxas")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Of one kernel on one chip. Of kernels that serve every element or width these are "" or 0."""

    kernel: str
    architecture: str
    element: str
    width: int
    registers: int
    stack: int
    spilled: int
    """bytes that are stored and loaded because registers do not suffice"""

    def __str__(self) -> str:
        return (
            f"{self.kernel}, {self.element} {self.width}, {self.architecture}: {self.registers} "
            f"registers, {self.stack} bytes of stack, {self.spilled} bytes spilled"
        )


def parse(report: str, element: str = "", width: int = 0) -> Iterator[Resources]:
    for entry in _ENTRY.finditer(report):
        kernel = _KERNEL.search(entry["symbol"])
        yield Resources(
            kernel=entry["symbol"] if kernel is None else kernel[1],
            architecture=entry["architecture"],
            element=element,
            width=width,
            registers=int(entry["registers"]),
            stack=int(entry["stack"]),
            spilled=int(entry["stores"]) + int(entry["loads"]),
        )


def reports(folder: Path) -> list[Resources]:
    """Of everything that nvcc compiled in this build folder."""
    found: list[Resources] = []
    for path in sorted(folder.rglob("*.ptxas")):
        unit = _UNIT.fullmatch(path.name)
        element, width = (unit[1], int(unit[2])) if unit else ("", 0)
        found += parse(path.read_text(), element, width)
    return found
