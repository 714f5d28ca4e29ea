"""Parser of the reports of `-Xptxas -v`, which the build keeps beside each object."""

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
KERNEL = re.compile(r"tk4cuda(?:4sm90)?L?\d+(\w+?_kernel)")
"""Name of a kernel in its mangled symbol."""
_UNIT = re.compile(r"kernels-(relative-|linear-)?(\w+?)-(\d+)(?:-(\d+))?\.o\.ptxas")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of one kernel on one architecture.

    `element` is "" and the widths are 0 for kernels that do not depend on them.
    """

    kernel: str
    architecture: str
    element: str
    width: int
    v_width: int
    """Width of v; 0 for kernels that do not depend on it."""
    registers: int
    stack: int
    spilled: int
    """Bytes of spill stores and spill loads."""
    products: str = ""
    """"relative-" for the kernels with relative keys, "linear-" for those of linear attention."""

    def __str__(self) -> str:
        return (
            f"{self.kernel}, {self.products}{self.element} {self._widths}, "
            f"{self.architecture}: {self.registers} "
            f"registers, {self.stack} bytes of stack, {self.spilled} bytes spilled"
        )

    @property
    def _widths(self) -> str:
        return f"{self.width}/{self.v_width}" if self.v_width else f"{self.width}"


def parse(
    report: str, element: str = "", width: int = 0, v_width: int = 0, products: str = ""
) -> Iterator[Resources]:
    """Resources of each kernel in the output of ptxas."""
    for entry in _ENTRY.finditer(report):
        kernel = KERNEL.search(entry["symbol"])
        yield Resources(
            kernel=entry["symbol"] if kernel is None else kernel[1],
            architecture=entry["architecture"],
            element=element,
            width=width,
            v_width=v_width,
            products=products,
            registers=int(entry["registers"]),
            stack=int(entry["stack"]),
            spilled=int(entry["stores"]) + int(entry["loads"]),
        )


def reports(folder: Path) -> list[Resources]:
    """Resources of all kernels that nvcc compiled in this build folder."""
    found: list[Resources] = []
    for path in sorted(folder.rglob("*.ptxas")):
        unit = _UNIT.fullmatch(path.name)
        variant = (unit[2], int(unit[3]), int(unit[4] or 0), unit[1] or "") if unit else ()
        found += parse(path.read_text(), *variant)
    return found


def diagnostics(folder: Path) -> list[str]:
    """Warnings and advisories of ptxas, such as C7510: wgmma products are serialized."""
    lines = [
        f"{path.name}: {line}"
        for path in sorted(folder.rglob("*.ptxas"))
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if re.search(r"warning|\bC\d{4}\b", line, re.IGNORECASE)]
