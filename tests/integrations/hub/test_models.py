"""Models of transformers with `attn_implementation="org/repository"` agree with "eager".

sentence-transformers joins the texts of a batch without padding, if the kernel has
`flash_attn_varlen_func`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.runner.checks import Sizes
from benchmarks.runner.run import Comparison, Run
from building.extension import ROOT
from tests.integrations.huggingface import families
from tests.integrations.huggingface.tiny_models import (
    assert_same_run,
    build,
    generated,
    named_paddings,
    names,
    run,
    transformers,
)
from tests.tools.bench.example import PROVENANCE
from transformer_kernels.bench import Budget

ATTENTION, FLASH_ATTN = "tk/attention", "tk/flash-attn"
UNPADDED = ("llama", "mistral", "gemma2", "gemma3", "qwen3", "bert", "modernbert", "whisper", "vit")
"""Models that flash_attn's functions can run: without position biases, chunks or sinks, and linear
layers of torch's class."""


def with_kernel(name: str, kernel: str) -> Any:
    model = build(name, "eager")
    model.set_attn_implementation(kernel)
    assert model.config._attn_implementation == kernel
    return model


def cases() -> Iterator[tuple[str, str, str]]:
    """Yields (kernel, model, padding). Without padding, windows cross gaps."""
    for name, kind_of_padding in named_paddings():
        yield ATTENTION, name, kind_of_padding
        if name in UNPADDED and kind_of_padding != "gaps":
            yield FLASH_ATTN, name, kind_of_padding


@pytest.mark.parametrize(("kernel", "name", "kind_of_padding"), list(cases()))
def test_agrees_with_eager(kernel: str, name: str, kind_of_padding: str) -> None:
    model = with_kernel(name, kernel)
    found = run(model, name, kind_of_padding)
    model.set_attn_implementation("eager")
    assert_same_run(found, run(model, name, kind_of_padding))


@pytest.mark.parametrize("kernel", [ATTENTION, FLASH_ATTN])
@pytest.mark.parametrize("name", [name for name in names("decoder") if name in UNPADDED])
def test_generation(name: str, kernel: str) -> None:
    model = with_kernel(name, kernel)
    ours = generated(model)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, generated(model))


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4", "nllb-moe"])
def test_masks_and_arguments(family: str) -> None:
    """Chosen keys, a mask that the model extends, modules that are not causal."""
    eager = families.built(family, "eager")
    ours = families.built(family, ATTENTION, eager.state_dict())
    for kind_of_padding in ("none", "left"):
        found = families.run(ours, kind_of_padding)
        assert_same_run(found, families.run(eager, kind_of_padding))


def test_models_with_attention_of_their_own() -> None:
    """Refused; the first model of a process, if it loads the kernel, runs as with "eager"."""
    config = transformers().BloomConfig(
        vocab_size=61, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0
    )
    with pytest.raises(ValueError, match="BloomForCausalLM computes attention in its own code"):
        transformers().BloomForCausalLM._from_config(config, attn_implementation=ATTENTION)
    code = f"""if True:
        import torch, transformers
        config = transformers.BloomConfig.from_dict({config.to_dict()})
        outputs = []
        for name in ("{ATTENTION}", "eager"):
            torch.manual_seed(0)
            model = transformers.BloomModel._from_config(config, attn_implementation=name).eval()
            outputs.append(model(torch.arange(12)[None]).last_hidden_state)
        assert torch.allclose(*outputs, atol=1e-5), outputs
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/quickstarts/sentence-transformers.md."""
    page = ROOT / "docs" / "quickstarts" / "sentence-transformers.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setenv("LOCAL_KERNELS", os.environ["LOCAL_KERNELS"])  # restored afterwards
    monkeypatch.chdir(ROOT)
    variables: dict[str, Any] = {}
    exec(code, variables)
    model = variables["model"]
    assert model.config._attn_implementation == ATTENTION
    assert all(
        x.grad.isfinite().all() for name, x in model.named_parameters() if "pooler" not in name
    )


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


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


def measured(runner: Any, folder: Path, dtype: torch.dtype) -> Run:
    case = Sizes(name="encoder", B=3, H_q=4, H_kv=4, M=20, N=20, dtype=dtype)
    run = Run(PROVENANCE, Budget(0.0, fewest=1), folder=folder, keep=False)
    measure = partial(runner.encoders, case, SIZES | {"num_attention_heads": 4})
    run.measure("a suite", Comparison(name="", measurements=measure))
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_benchmark(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Peers are measured without gradients; one that is not installed is named."""
    peers = {
        "eager": lambda folder, dtype, _: runner.encoder(folder, "eager", dtype),
        "absent": lambda *_: import_module("absent"),
    }
    monkeypatch.setattr(runner, "PEERS", peers)
    run = measured(runner, tmp_path, dtype)
    ours = ["sdpa", "tk/attention", "tk/flash-attn"]
    assert [(row.direction, row.variant) for row in run.rows] == [
        *(("fwd", variant) for variant in [*ours, "eager"]),
        *(("fwd+bwd", variant) for variant in ours),
    ]
    assert all(row.median_ms > 0 for row in run.rows)
    (skipped,) = run.skipped
    assert skipped.endswith(": absent: No module named 'absent'")


def test_a_wrong_result_stops_the_benchmark(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import get_kernel

    varlen = sys.modules[get_kernel(FLASH_ATTN, version=0).flash_attn_varlen_func.__module__]
    right: Any = varlen.attention_varlen

    def wrong(*arguments: Any, **options: Any) -> Any:
        return 1.1 * right(*arguments, **options)

    monkeypatch.setattr(varlen, "attention_varlen", wrong)
    with pytest.raises(AssertionError, match=r"fwd, float32: tk/flash-attn is .* off"):
        measured(runner, tmp_path, torch.float32)
