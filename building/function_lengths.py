"""Limits on the length of functions, in lines: `python -m building.function_lengths`.

Host functions have at most 60 lines, device functions (CUDA and Triton) at most 100. Docstrings do
not count. `make lint` runs it; the exit status is 1 if a function is longer.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HOST, DEVICE = 60, 100
DEVICE_FOLDERS = (
    *("csrc/cuda/common", "csrc/cuda/sm80", "csrc/cuda/sm90", "kernels/cuda/programs"),
    "triton/kernels",
)

_DIRECTIVE = r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*"
_COMMENT = r"//[^\n]*|/\*.*?\*/"
_LITERAL = r'R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
_NO_CODE = re.compile("|".join((_DIRECTIVE, _COMMENT, _LITERAL)), re.DOTALL | re.MULTILINE)
_NOT_A_FUNCTION = re.compile(
    r"^(?:if|else|for|while|do|switch|case|catch|try|return|namespace|struct|class|union|enum|extern"
    r"|using|typedef|#)\b"
)


class Function(NamedTuple):
    """A function and its length in lines, from its signature to its closing brace."""

    name: str
    line: int
    length: int


def cpp_functions(text: str) -> Iterator[Function]:
    """Functions and methods of C++ source in Google's format; lambdas count where they stand."""
    code = _NO_CODE.sub(lambda found: "\n" * found[0].count("\n"), text)
    open_functions: list[Function | None] = []
    statement = 0  # where the statement begins that a brace may open
    for at in re.finditer(r"[{};]", code):
        if at[0] == "{":
            head = code[statement : at.start()].strip()
            inside = any(function is not None for function in open_functions)
            open_functions.append(None if inside else _function(head, code, at.start()))
        elif at[0] == "}" and open_functions:
            function = open_functions.pop()
            if function is not None:
                last = code.count("\n", 0, at.start()) + 1
                yield function._replace(length=last - function.line + 1)
        statement = at.end()


def _function(head: str, code: str, brace: int) -> Function | None:
    """The function whose body opens at `brace`; None for a class, a namespace or an initializer."""
    head = re.sub(r"^(?:#[^\n]*\n|public:|private:|protected:|\s)+", "", head)
    signature = re.sub(r"^template\s*<.*?>\s*(?=[\w:])", "", head, flags=re.DOTALL)
    if _NOT_A_FUNCTION.match(signature) or "(" not in signature or "=" in signature.split("(")[0]:
        return None
    names = re.findall(r"([\w:~]+)\s*\(", signature) or ["operator"]
    name = names[-1] if names[0] == "TK_KERNEL" else names[0]
    return Function(name, code.count("\n", 0, code.rindex(head, 0, brace)) + 1, 0)


def python_functions(text: str) -> Iterator[Function]:
    """Functions and methods of Python source, without their docstrings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
            length = (node.end_lineno or 0) - node.lineno + 1 - docstring
            yield Function(node.name, node.lineno, length)


def too_long(root: Path = ROOT) -> list[str]:
    """A line for each function above its limit."""
    found = []
    folders = ("csrc", "transformer_kernels", "benchmarks", "building", "tests")
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh", ".py"):
            continue
        name = str(path.relative_to(root))
        limit = DEVICE if any(folder in name for folder in DEVICE_FOLDERS) else HOST
        functions = python_functions if path.suffix == ".py" else cpp_functions
        found += [
            f"{name}:{one.line}: {one.name} has {one.length} lines, more than {limit}"
            for one in functions(path.read_text())
            if one.length > limit
        ]
    return found


def main() -> int:
    lines = too_long()
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
