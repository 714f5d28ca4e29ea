"""Each Python block of docs/quickstarts runs by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from building.extension import ROOT
from tests.integrations.huggingface.tiny_models import transformers
from tests.support.backends import needs_varlen
from transformer_kernels.integrations.huggingface import NAME

PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "quickstarts").glob("*.md"))
}
TRANSFORMERS = "transformers"
"""The page whose examples are models; `make test` does not install the package."""
HUB = "sentence-transformers"
"""The page whose example integrations/hub/test_models.py runs."""
WITHOUT_CODE = {"index"}


class Example(NamedTuple):
    page: str
    section: str
    code: str

    @property
    def id(self) -> str:
        return f"{self.page}: {self.section}"


def examples() -> Iterator[Example]:
    """Yields the Python blocks of all pages, each with the heading above it."""
    for page, text in PAGES.items():
        section = ""
        for block in re.finditer(r"^#+ ([^\n]+)$|^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            heading, language, code = block.groups()
            section = heading or section
            if language == "python":
                yield Example(page, section, code)


EXAMPLES = list(examples())
TRAINED = {"transformers: HuggingFace transformers", "transformers: Hybrid models"}
"""Examples that end with the gradients of a model."""
LENGTHS = "torch: Sequences of different lengths"


def marks(example: Example) -> list[pytest.MarkDecorator]:
    if example.page == TRANSFORMERS:
        return [pytest.mark.exhaustive]
    return [needs_varlen] if example.id == LENGTHS else []


def test_every_block_is_an_example() -> None:
    """However a fence is written: with spaces, tildes, attributes or in a list."""
    for page, text in PAGES.items():
        fences = re.findall(r"^[ \t>*+-]*(?:`{3,}|~{3,})[ \t{.]*py", text, re.M | re.I)
        found = [example for example in EXAMPLES if example.page == page]
        assert len(found) == len(fences), page
        assert bool(found) == (page not in WITHOUT_CODE), page
    ids = [example.id for example in EXAMPLES]
    assert len(ids) == len(set(ids)), ids
    assert TRAINED | {LENGTHS} <= set(ids)
    assert sum(example.page == HUB for example in EXAMPLES) == 1


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one.id, marks=marks(one)) for one in EXAMPLES if one.page != HUB],
)
def test_example(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if example.page == TRANSFORMERS:
        transformers()
    variables: dict[str, Any] = {}
    exec(example.code, variables)
    if example.page == TRANSFORMERS:
        model = variables["model"]
        assert isinstance(model, transformers().PreTrainedModel)
        assert model.config._attn_implementation == NAME
    if example.id in TRAINED:
        assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
