"""The examples of docs/drop-in.md run, each on its own."""

from __future__ import annotations

import re

import pytest

from building.extension import ROOT
from tests.support.torch_releases import needs_varlen

PAGE = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
ELSEWHERE = {"HuggingFace transformers", "Kernels of HuggingFace's hub"}
"""Run by integrations/huggingface/test_example.py and hub/test_models.py, with more checks."""


MARKS = {"Sequences of different lengths": needs_varlen}


@pytest.mark.parametrize(
    "section",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in SECTIONS if name not in ELSEWHERE],
)
def test_example(section: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    exec(code, {})
