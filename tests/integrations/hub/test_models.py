"""Models of transformers with `attn_implementation="org/repository"` agree with "eager"."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from building.extension import ROOT
from tests.integrations.huggingface import families
from tests.integrations.huggingface.tiny_models import (
    PADDINGS,
    TINY,
    assert_close,
    assert_same_gradients,
    build,
    names,
    padding,
    run,
    tokens,
    transformers,
)

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
    """Yields (kernel, model, padding). Images have none. Without padding, windows cross gaps."""
    for name, tiny in TINY.items():
        for kind_of_padding in PADDINGS if tiny.kind != "image" else ("none",):
            yield ATTENTION, name, kind_of_padding
            if name in UNPADDED and kind_of_padding != "gaps":
                yield FLASH_ATTN, name, kind_of_padding


@pytest.mark.parametrize(("kernel", "name", "kind_of_padding"), list(cases()))
def test_agrees_with_eager(kernel: str, name: str, kind_of_padding: str) -> None:
    model = with_kernel(name, kernel)
    output, gradients = run(model, name, kind_of_padding)
    model.set_attn_implementation("eager")
    expected, wanted = run(model, name, kind_of_padding)
    assert_close(output, expected)
    assert_same_gradients(gradients, wanted)


@pytest.mark.parametrize("kernel", [ATTENTION, FLASH_ATTN])
@pytest.mark.parametrize("name", [name for name in names("decoder") if name in UNPADDED])
def test_generation(name: str, kernel: str) -> None:
    """The prompts are padded on the left."""
    model = with_kernel(name, kernel)
    model.generation_config.eos_token_id = None

    def generated() -> Tensor:
        found: Tensor = model.generate(
            input_ids=tokens(9),
            attention_mask=padding("left", 9),
            max_new_tokens=10,
            do_sample=False,
        )
        return found

    ours = generated()
    model.set_attn_implementation("eager")
    assert torch.equal(ours, generated())


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4", "nllb-moe"])
def test_masks_and_arguments(family: str) -> None:
    """Chosen keys, a mask that the model extends, modules that are not causal."""
    eager = families.built(family, "eager")
    ours = families.built(family, ATTENTION, eager.state_dict())
    for kind_of_padding in ("none", "left"):
        output, gradients = families.run(ours, kind_of_padding)
        expected, wanted = families.run(eager, kind_of_padding)
        assert_close(output, expected)
        assert_same_gradients(gradients, wanted)


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
    """The example of docs/drop-in.md."""
    page = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
    section = page.partition("## Kernels of HuggingFace's hub\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.setenv("LOCAL_KERNELS", os.environ["LOCAL_KERNELS"])  # restored afterwards
    monkeypatch.chdir(ROOT)
    variables: dict[str, Any] = {}
    exec(code, variables)
    model = variables["model"]
    assert model.config._attn_implementation == ATTENTION
    assert all(
        x.grad.isfinite().all() for name, x in model.named_parameters() if "pooler" not in name
    )
