from __future__ import annotations

import re

import pytest

from building.extension import ROOT
from tests.support.shares import BUILD, COMPILING, WITH_CUDA, Share
from tests.support.tiers import each

NAMES = [f"tests/a/test_b.py::test_c[{n}-float32]" for n in range(3000)]


def shares(count: int, names: list[str], seconds: dict[str, float] | None = None) -> list[set[str]]:
    return [Share(k, count).of(names, seconds or {}) for k in range(1, count + 1)]


def test_every_test_is_in_one_share_and_shares_have_similar_sizes() -> None:
    found = shares(3, NAMES)
    assert set.union(*found) == {*NAMES}
    assert sum(map(len, found)) == len(NAMES)
    assert all(abs(len(share) - 1000) < 100 for share in found)
    assert Share.parse("1/1").of(NAMES, {}) == {*NAMES}


def test_long_tests_balance_the_shares_and_move_no_other() -> None:
    """Together with the build of CUDA kernels in the last share."""
    long = [f"tests/a/test_long.py::test_{n}" for n in range(60)]
    seconds = {name: 10.0 + n for n, name in enumerate(long)} | {"tests/a/test_b.py::test_c": 0.01}
    found, without = shares(3, [*NAMES, *long], seconds), shares(3, NAMES, seconds)
    loads = [sum(seconds[name.partition("[")[0]] for name in share) for share in found]
    loads[-1] += BUILD
    assert max(loads) - min(loads) < 10.0
    assert [share - {*long} for share in found] == without


@pytest.mark.parametrize("folder", COMPILING)
def test_files_that_compile_kernels_are_in_one_share(folder: str) -> None:
    for file in ("test_a.py", "test_b.py", "c/test_d.py"):
        names = [f"{folder}{file}::test_c[{n}-float32]" for n in range(100)]
        for seconds in (0.0, 5.0):
            found = shares(8, names, {f"{folder}{file}::test_c": seconds})
            assert sorted(map(len, found)) == [0] * 7 + [100]


def test_ci_builds_cuda_kernels_for_the_share_that_tests_them() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert re.search(r'if \[ "\$share" = "\$shares" \]; then chips=9\.0', script)
    names = [f"{file}::test_x" for file in WITH_CUDA]
    assert shares(8, names)[-1] == {*names}


@each("text", ["", "2", "0/3", "4/3", "-1/3", "1/0", "1/3 ", "²/3"])
def test_other_forms_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"--share must be K/N .* such as 2/8, got"):
        Share.parse(text)
