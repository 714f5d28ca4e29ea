"""The example of docs/drop-in.md, and `register`."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from building.extension import ROOT
from tests.integrations.huggingface.tiny_models import transformers
from transformer_kernels.integrations.huggingface import NAME, register


@pytest.mark.exhaustive
def test_example() -> None:
    transformers()
    page = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    variables: dict[str, object] = {}
    exec(example, variables)
    model = variables["model"]
    assert isinstance(model, transformers().PreTrainedModel)
    assert model.config._attn_implementation == NAME
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


@pytest.mark.exhaustive
def test_without_register_the_name_is_unknown() -> None:
    library = transformers()
    register()
    config = library.LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    with pytest.raises(ValueError, match="is not supported"):
        library.LlamaModel._from_config(config, attn_implementation="transformer_kernel")


def test_a_missing_or_old_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install transformer_kernels\[huggingface\]"):
        register()
    monkeypatch.undo()
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: object())
    for version in ("4.57.1", "5.3.0"):
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
        with pytest.raises(ImportError, match=rf"needs transformers 5.4 or later, got {version}"):
            register()
