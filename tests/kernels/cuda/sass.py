"""Instructions of main loops of compiled kernels: `python -m tests.kernels.cuda.sass OBJECT ...`.

A main loop has branches for masks and options. What most tiles execute is its shortest path with
all matrix products. `main_loop` finds it in the graph of instructions that cuobjdump prints.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from transformer_kernels.backends.triton.compile_report import cuobjdump

KERNEL = re.compile(r"tk4cuda(?:4sm90)?L?\d+(\w+?_kernel)")
"""Name of a kernel in its mangled symbol."""
_ARCHITECTURE = re.compile(r"code for (sm_\w+)")
_FUNCTION = re.compile(r"Function : (\w+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;")
_OPERATION = re.compile(r"(?:@!?U?P\w+\s+)?([\w.]+)")
# A call under a predicate is a jump too far for BRA.
_JUMP = re.compile(r"(?:\bBRA\b|@\S+ CALL\.REL\.NOINC).* 0x([0-9a-f]+)$")


@dataclass(frozen=True)
class Instruction:
    """One instruction, at an index of its function."""

    text: str
    target: int | None
    """Index that a branch jumps to."""

    @cached_property
    def operation(self) -> str:
        """The name without modifiers, such as "HMMA"."""
        match = _OPERATION.match(self.text)
        assert match is not None, self.text
        return match[1].split(".")[0]

    @property
    def is_product(self) -> bool:
        """True for mma.sync and wgmma."""
        return self.operation in ("HMMA", "HGMMA")

    @property
    def falls_through(self) -> bool:
        """False for unconditional jumps and exits."""
        if self.text.startswith("@"):
            return True
        if self.operation == "BRA":  # conditional as "BRA.DIV UR4, 0x40" or "BRA P1, 0x40", too
            return "," in self.text
        return self.operation != "EXIT"


@dataclass(frozen=True)
class LoopPath:
    """The instructions of one iteration of a loop."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(one.operation for one in self.instructions)

    @property
    def products(self) -> int:
        return sum(one.is_product for one in self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)


def main_loops(listing: str) -> dict[tuple[str, str], LoopPath]:
    """The main loop of each kernel that has one in the output of `cuobjdump -sass`, by kernel and
    architecture."""
    found = {}
    for kernel, instructions in kernels(listing).items():
        try:
            found[kernel] = main_loop(instructions)
        except NoLoopError:
            continue
    return found


def kernels(listing: str) -> dict[tuple[str, str], tuple[Instruction, ...]]:
    """The instructions of each kernel in the output of `cuobjdump -sass`, by kernel and
    architecture."""
    found = {}
    for architecture, code in _split(_ARCHITECTURE, listing):
        for symbol, function in _split(_FUNCTION, code):
            kernel = KERNEL.search(symbol)
            name = symbol if kernel is None else kernel[1]
            found[name, architecture] = instructions_of(function)
    return found


def _split(heading: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
    """The first group of each heading, with the text up to the next one."""
    found = list(heading.finditer(text))
    ends = [one.start() for one in found[1:]] + [len(text)]
    for one, end in zip(found, ends, strict=True):
        yield one[1], text[one.end() : end]


class NoLoopError(ValueError):
    """A function has no loop with matrix products."""


def instructions_of(listing: str) -> tuple[Instruction, ...]:
    """The instructions in the listing of one function."""
    lines = _INSTRUCTION.findall(listing)
    index = {int(address, 16): n for n, (address, _) in enumerate(lines)}

    def target(text: str) -> int | None:
        jump = _JUMP.search(text)
        return None if jump is None else index[int(jump[1], 16)]

    return tuple(Instruction(text, target(text)) for _, text in lines)


def listed_before(instructions: Sequence[Instruction], operation: str) -> tuple[Instruction, ...]:
    """The instructions in the listing before the first one with this operation."""
    return tuple(takewhile(lambda one: one.operation != operation, instructions))


def shortest_path_to(
    instructions: Sequence[Instruction], operation: str
) -> tuple[Instruction, ...]:
    """The fewest instructions from the first one on that lead to this operation, without it."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    pending = deque(paths)
    while instructions[n := pending.popleft()].operation != operation:
        for one in _next(instructions, n):
            if one not in paths:
                paths[one] = (*paths[n], n)
                pending.append(one)
    return tuple(instructions[n] for n in paths[n])


def main_loop(instructions: Sequence[Instruction]) -> LoopPath:
    """One iteration of the innermost loop with most products, with as few instructions as possible.

    Loops within it, over waits and options, are not taken twice.
    """
    loops = [loop for loop in _loops(instructions) if loop.has_products(instructions)]
    innermost = [loop for loop in loops if not any(other.body < loop.body for other in loops)]
    if not innermost:
        raise NoLoopError
    paths = [loop.shortest_path(instructions) for loop in innermost]
    return max(paths, key=lambda path: path.products)


@dataclass(frozen=True)
class _Loop:
    """A natural loop, of indices."""

    header: int
    body: frozenset[int]

    def has_products(self, instructions: Sequence[Instruction]) -> bool:
        return any(instructions[n].is_product for n in self.body)

    def shortest_path(self, instructions: Sequence[Instruction]) -> LoopPath:
        """The path from the header back to it with most products, of those the shortest."""
        best: dict[int, tuple[int, int]] = {}  # products and -length of the rest of the path
        following: dict[int, int] = {}
        for n in _postorder(instructions, self.header):
            rest = [(best[one], one) for one in _next(instructions, n) if one in best]
            if self.header in _next(instructions, n):
                rest.append(((0, 0), self.header))
            if n not in self.body or not rest:
                continue
            (products, length), following[n] = max(rest)
            best[n] = (products + instructions[n].is_product, length - 1)
        path = [self.header]
        while following[path[-1]] != self.header:
            path.append(following[path[-1]])
        return LoopPath(tuple(instructions[n] for n in path))


def _loops(instructions: Sequence[Instruction]) -> list[_Loop]:
    before: dict[int, list[int]] = {}
    position = {n: at for at, n in enumerate(_postorder(instructions, 0))}
    for n in position:
        for one in _next(instructions, n):
            before.setdefault(one, []).append(n)
    loops = []
    for header, sources in before.items():
        # Every edge that goes back in reverse postorder ends a loop.
        latches = [n for n in sources if position[n] <= position[header]]
        if not latches:
            continue
        body, pending = {header}, latches
        while pending:
            n = pending.pop()
            if n not in body:
                body.add(n)
                pending += before[n]
        loops.append(_Loop(header, frozenset(body)))
    return loops


def _postorder(instructions: Sequence[Instruction], start: int) -> Iterator[int]:
    """Indices that are reachable from `start`; without loops, each after those that follow it."""
    seen = {start}
    stack = [(start, iter(_next(instructions, start)))]
    while stack:
        n, successors = stack[-1]
        following = next((one for one in successors if one not in seen), None)
        if following is None:
            yield n
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(_next(instructions, following))))


def _next(instructions: Sequence[Instruction], n: int) -> list[int]:
    one = instructions[n]
    after = [n + 1] if one.falls_through and n + 1 < len(instructions) else []
    return [*after, *(() if one.target is None else (one.target,))]


def main(paths: Sequence[str]) -> None:
    for path in map(Path, paths):
        for (kernel, architecture), loop in main_loops(cuobjdump("-sass", str(path))).items():
            most = ", ".join(f"{count} {name}" for name, count in loop.counts.most_common(12))
            print(f"{path.stem}, {kernel}, {architecture}: {len(loop)} instructions: {most}")


if __name__ == "__main__":
    main(sys.argv[1:])
