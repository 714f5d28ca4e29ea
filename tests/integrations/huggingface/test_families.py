"""Every text family of transformers fares as docs/drop-in.md says."""

from __future__ import annotations

import pytest

from tests.integrations.huggingface.families import compare, families, recorded
from tests.integrations.huggingface.tiny_models import transformers

pytestmark = pytest.mark.exhaustive  # `make test` does not install transformers


@pytest.mark.parametrize(("family", "label"), recorded().items())
def test_outcome(family: str, label: str) -> None:
    transformers()
    outcome = compare(family)
    assert outcome.label == label, outcome.detail


def test_every_family_is_recorded() -> None:
    transformers()
    assert sorted(recorded()) == families()
