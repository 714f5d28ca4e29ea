"""sentence-transformers joins the texts of a batch without padding, if the kernel has
`flash_attn_varlen_func`; and the benchmark of that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.huggingface.tiny_models import transformers

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
FLASH_ATTN = "tk/flash-attn"


@pytest.fixture(scope="module")
def runner() -> Any:
    transformers()
    from benchmarks.runner import hub

    return hub


@pytest.fixture(scope="module")
def folder(runner: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    runner.write_encoder(path, **SIZES, num_attention_heads=4)
    return path


def test_texts_of_different_lengths(runner: Any, folder: Path) -> None:
    texts = runner.texts(6, 48)
    expected = runner.encoder(folder, "sdpa").encode(texts, convert_to_tensor=True)
    unpadded, shapes = runner.encoder(folder, FLASH_ATTN), []
    forward = unpadded[0].model.forward

    def recorded(**arguments: Any) -> Any:
        shapes.append(tuple(arguments["input_ids"].shape))
        return forward(**arguments)

    unpadded[0].model.forward = recorded
    found = unpadded.encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert shapes == [(1, 3 + 12 + 21 + 30 + 39 + 48)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_benchmark(runner: Any, folder: Path, dtype: torch.dtype) -> None:
    rows = list(runner.measure(folder, runner.texts(3, 20), dtype, seconds=0.01))
    assert [row.what for row in rows] == ["encode", "training step"]
    for row in rows:
        assert list(row.milliseconds) == ["sdpa", "attention", "ours"]
        assert all(time > 0 for time in row.milliseconds.values())


def test_a_wrong_result_stops_the_benchmark(
    runner: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import get_kernel

    varlen = sys.modules[get_kernel(FLASH_ATTN, version=1).flash_attn_varlen_func.__module__]
    right: Any = varlen.attention_varlen

    def wrong(*arguments: Any, **options: Any) -> Any:
        return 1.1 * right(*arguments, **options)

    monkeypatch.setattr(varlen, "attention_varlen", wrong)
    with pytest.raises(AssertionError, match=r"encode, torch\.float32: ours is .* off"):
        list(runner.measure(folder, runner.texts(3, 20), torch.float32, seconds=0.01))
