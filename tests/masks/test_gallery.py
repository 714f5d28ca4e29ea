"""Pictures of docs/masks.md: each is what the code above it prints, and every kind has one."""

from __future__ import annotations

import inspect
import re

import pytest

from building.extension import ROOT
from transformer_kernels.masks import block_patterns
from transformer_kernels.masks.mask import Mask

PAGE = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
IMPORTS, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = re.findall(r"```python\n([^`]*)```\n\n```text\n([^`]*)```", PAGE)
NOT_KINDS = {"materialize", "check", "to", "device", "sliced", "tensors", "show", "plot"}


@pytest.mark.parametrize(("code", "picture"), EXAMPLES, ids=[code for code, _ in EXAMPLES])
def test_picture(code: str, picture: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(IMPORTS + code, {})
    assert capsys.readouterr().out == picture


def test_every_kind_has_a_picture() -> None:
    kinds = {f"Mask.{name}" for name in vars(Mask) if name[0] != "_" and name not in NOT_KINDS}
    kinds -= {"Mask.constraints"}
    patterns = {
        name
        for name, one in inspect.getmembers(block_patterns, inspect.isfunction)
        if one.__module__ == block_patterns.__name__ and name[0] != "_"
    }
    code = "\n".join(code for code, _ in EXAMPLES)
    missing = [name for name in kinds | patterns if f"{name}(" not in code]
    assert missing == []
