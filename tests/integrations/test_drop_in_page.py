"""The examples of docs/drop-in.md run, each on its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from building.extension import ROOT
from tests.integrations.huggingface.tiny_models import transformers
from tests.support.backends import needs_varlen
from transformer_kernels.integrations.huggingface import NAME

PAGE = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
HUGGINGFACE, PACKED = "HuggingFace transformers", "Packed training"
HYBRID, INT8 = "Hybrid models", "Caches in int8"
HUB = "Kernels of HuggingFace's hub"
"""Sections with examples of models; integrations/hub/test_models.py runs the second one."""
MARKS = {
    "Sequences of different lengths": needs_varlen,
    # `make test` does not install transformers
    **dict.fromkeys((HUGGINGFACE, PACKED, HYBRID, INT8), pytest.mark.exhaustive),
}


@pytest.mark.parametrize(
    "section", [pytest.param(name, marks=MARKS.get(name, ())) for name in SECTIONS if name != HUB]
)
def test_example(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    needs_transformers = section in (HUGGINGFACE, PACKED, HYBRID, INT8)
    if needs_transformers:
        transformers()
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    variables: dict[str, Any] = {}
    exec(code, variables)
    if needs_transformers:
        model = variables["model"]
        assert isinstance(model, transformers().PreTrainedModel)
        assert model.config._attn_implementation == NAME
    if section in (HUGGINGFACE, HYBRID):
        assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
