"""The benchmark of models of transformers, at toy sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.huggingface.tiny_models import transformers
from transformer_kernels.integrations.huggingface import NAME
from transformer_kernels.integrations.huggingface import attention as adapter

pytestmark = pytest.mark.exhaustive  # `make test` does not install transformers

SMALL: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 24, "intermediate_size": 16},
    "gemma2-2b": {"hidden_size": 32, "intermediate_size": 16, "head_dim": 8},
    "whisper-small": {"d_model": 24, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    transformers()
    from benchmarks.runner import huggingface

    for name, sizes in SMALL.items():
        model = huggingface.MODELS[name]
        length = model.length and 24
        small = replace(model, sizes=model.sizes | sizes, batch=2, length=length)
        monkeypatch.setitem(huggingface.MODELS, name, small)
    return huggingface


@pytest.mark.parametrize("name", SMALL)
def test_rows(runner: Any, name: str) -> None:
    rows = list(runner.measure(name, torch.float32, seconds=0.01))
    kinds = ["forward", "training step"] + ["decode"] * (name == "gemma2-2b")
    assert [row.what for row in rows] == kinds
    assert len(runner.table(rows)) == 2 + len(kinds)
    names = [one for one in runner.IMPLEMENTATIONS if name != "gemma2-2b" or one != "sdpa"]
    for row in rows:
        assert list(row.milliseconds) == names
        assert all(time > 0 for time in row.milliseconds.values())


def test_a_wrong_result_stops_the_measurement(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    def wrong(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        o, _ = adapter.attention_forward(*arguments, **options)
        return 1.1 * o, None

    monkeypatch.setattr(runner, "register", lambda: AttentionInterface.register(NAME, wrong))
    with pytest.raises(AssertionError, match="Bert"):
        list(runner.measure("bert", torch.float32, seconds=0.01))
    AttentionInterface.register(NAME, adapter.attention_forward)


def test_every_case_is_a_model(runner: Any) -> None:
    """The configurations are those that transformers accepts, with two layers."""
    for model in runner.MODELS.values():
        assert hasattr(transformers(), f"{model.kind}Model")
        config = getattr(transformers(), f"{model.kind}Config")(**model.sizes)
        assert config.get_text_config().num_hidden_layers == 2
