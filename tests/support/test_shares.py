from __future__ import annotations

import re
from typing import Any
from unittest.mock import Mock

import pytest

from building.extension import ROOT
from tests.support.shares import COMPILING, Share, keep_share

NAMES = [f"tests/a/test_b.py::test_c[{n}-float32]" for n in range(3000)]


def test_every_test_is_in_one_share_and_shares_have_similar_sizes() -> None:
    shares = [{name for name in NAMES if Share(k, 3).has(name)} for k in (1, 2, 3)]
    assert set.union(*shares) == {*NAMES}
    assert sum(map(len, shares)) == len(NAMES)
    assert all(abs(len(share) - 1000) < 100 for share in shares)
    assert {name for name in NAMES if Share.parse("1/1").has(name)} == {*NAMES}


@pytest.mark.parametrize("folder", COMPILING)
def test_files_that_compile_kernels_are_in_one_share(folder: str) -> None:
    for file in ("test_a.py", "test_b.py", "c/test_d.py"):
        names = [f"{folder}{file}::test_c[{n}-float32]" for n in range(100)]
        shares = [{Share(k, 8).has(name) for name in names} for k in range(1, 9)]
        assert sorted(map(len, shares)) == [1] * 8
        assert shares.count({True}) == 1


def test_ci_builds_cuda_kernels_for_the_share_that_tests_them() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    (built,) = re.findall(r'if \[ "\$share" = (\d+) \]; then chips=9\.0', script)
    (count,) = re.findall(r"^shares=(\d+)$", script, re.MULTILINE)
    assert Share(int(built), int(count)).has("tests/csrc/cuda/test_resources.py::test_x")


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "-1/3", "1/0", "1/3 ", "²/3"])
def test_other_forms_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"--share must be K/N .* such as 2/8, got"):
        Share.parse(text)


def test_other_shares_are_deselected() -> None:
    config: Any = Mock()
    items: list[Any] = [Mock(nodeid=name) for name in NAMES]
    kept = [*items]
    keep_share("2/3", config, kept)
    (call,) = config.hook.pytest_deselected.call_args_list
    assert kept == [item for item in items if Share(2, 3).has(item.nodeid)]
    assert {*map(id, call.kwargs["items"])} == {*map(id, items)} - {*map(id, kept)}
    with pytest.raises(pytest.UsageError, match="--share must be K/N"):
        keep_share("4/3", config, kept)
