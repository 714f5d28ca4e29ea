"""Lengths of functions, as `make lint` counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from building.function_lengths import Function, cpp_functions, python_functions, too_long

CPP = """
#define OPEN(x) \\
  { x
namespace tk {

struct Params {
  int M = 0;
  int rows() const { return M; }
};

constexpr int kWidths[] = {1, 2};

// A brace { in a comment, and in a "string {".
template <typename Real>
void pack(const Real* x,
          int count) {
  const auto body = [&](int i) {
    if (i < count) {
      print("}");
    }
  };
  body(0);
}

template <int kWidth>
TK_KERNEL((tile<kWidth>.threads()), 1)
forward_kernel(const Params p) {
  run(p);
}

}  // namespace tk
"""

PYTHON = '''
def documented(x: int) -> int:
    """Two lines
    of docstring."""
    return x
'''


def test_functions_of_cpp() -> None:
    assert list(cpp_functions(CPP)) == [
        Function("rows", 8, 1),
        Function("pack", 14, 10),
        Function("forward_kernel", 25, 5),
    ]


def test_docstrings_do_not_count() -> None:
    assert list(python_functions(PYTHON)) == [Function("documented", 2, 2)]


@pytest.mark.parametrize(("folder", "limit"), [("csrc/cpu", 60), ("csrc/cuda/sm80", 100)])
def test_longer_functions_are_named(tmp_path: Path, folder: str, limit: int) -> None:
    path = tmp_path / folder / "long.h"
    path.parent.mkdir(parents=True)
    path.write_text("void f() {\n" + "  g();\n" * (limit - 2) + "}\n")
    assert too_long(tmp_path) == []
    path.write_text("void f() {\n" + "  g();\n" * (limit - 1) + "}\n")
    assert too_long(tmp_path) == [f"{folder}/long.h:1: f has {limit + 1} lines, more than {limit}"]
