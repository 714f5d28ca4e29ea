"""sentence-transformers joins the texts of a batch without padding, if the kernel has
`flash_attn_varlen_func`; and the benchmark of that."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.runner.checks import Sizes
from benchmarks.runner.run import Comparison, Run
from tests.bench.example import PROVENANCE
from tests.integrations.huggingface.tiny_models import transformers
from transformer_kernels.bench import Budget, Row

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
FLASH_ATTN = "tk/flash-attn"


@pytest.fixture(scope="module")
def runner() -> Any:
    transformers()
    from benchmarks.suites import sentence_encoder

    return sentence_encoder


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


def measured(runner: Any, folder: Path, dtype: torch.dtype) -> list[Row]:
    case = Sizes(name="encoder", B=3, H_q=4, H_kv=4, M=20, N=20, dtype=dtype)
    run = Run(PROVENANCE, Budget(0.0, fewest=1), folder=folder, keep=False)
    measure = partial(runner.encoders, case, SIZES | {"num_attention_heads": 4})
    return run.measure("a suite", Comparison(name="", measurements=measure))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_benchmark(runner: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    rows = measured(runner, tmp_path, dtype)
    assert [(row.direction, row.variant) for row in rows] == [
        (direction, variant)
        for direction in ("fwd", "fwd+bwd")
        for variant in ("sdpa", "tk/attention", "tk/flash-attn")
    ]
    assert all(row.median_ms > 0 for row in rows)


def test_a_wrong_result_stops_the_benchmark(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import get_kernel

    varlen = sys.modules[get_kernel(FLASH_ATTN, version=1).flash_attn_varlen_func.__module__]
    right: Any = varlen.attention_varlen

    def wrong(*arguments: Any, **options: Any) -> Any:
        return 1.1 * right(*arguments, **options)

    monkeypatch.setattr(varlen, "attention_varlen", wrong)
    with pytest.raises(AssertionError, match=r"fwd, float32: tk/flash-attn is .* off"):
        measured(runner, tmp_path, torch.float32)
