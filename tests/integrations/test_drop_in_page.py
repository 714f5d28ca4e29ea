"""The examples of docs/drop-in.md run, each on its own."""

from __future__ import annotations

import re

import pytest

from building.extension import ROOT

PAGE = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
ELSEWHERE = {"HuggingFace transformers"}
"""integrations/huggingface/test_example.py runs it and looks at the model."""


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in ELSEWHERE])
def test_example(section: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    exec(code, {})
