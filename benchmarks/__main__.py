"""Measures suites with pytest: `python -m benchmarks SUITE... [options]`."""

from __future__ import annotations

import sys
from itertools import takewhile
from pathlib import Path

import pytest

if __name__ == "__main__":
    suites = list(takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    chosen = ["--suite", ",".join(suites)] if suites else []
    sys.exit(pytest.main([str(Path(__file__).parent), *chosen, *sys.argv[1 + len(suites) :]]))
