from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.shares import Share, keep_share

NAMES = [f"tests/a/test_b.py::test_c[{n}-float32]" for n in range(3000)]


def test_every_test_is_in_one_share_and_shares_have_similar_sizes() -> None:
    shares = [{name for name in NAMES if Share(k, 3).has(name)} for k in (1, 2, 3)]
    assert set.union(*shares) == {*NAMES}
    assert sum(map(len, shares)) == len(NAMES)
    assert all(abs(len(share) - 1000) < 100 for share in shares)
    assert {name for name in NAMES if Share.parse("1/1").has(name)} == {*NAMES}


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "-1/3", "1/0", "1/3 ", "²/3"])
def test_other_forms_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"--share must be K/N .* such as 2/3, got"):
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
