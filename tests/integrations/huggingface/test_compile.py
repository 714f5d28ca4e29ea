"""Models of transformers in compiled code, without graph breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from tests.integrations.huggingface.tiny_models import (
    LENGTH,
    assert_close,
    assert_same_gradients,
    build,
    inputs,
    padding,
    run,
    tokens,
)
from transformer_kernels import Mask
from transformer_kernels.integrations.huggingface.lazy_mask import LazyMask

pytestmark = pytest.mark.exhaustive  # `make test` does not install transformers


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("kind_of_padding", ["none", "left"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss", "bert", "t5", "vit"])
def test_whole_models(name: str, kind_of_padding: str) -> None:
    model = build(name)
    expected, wanted = run(model, name, kind_of_padding)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    output, gradients = run(model, name, kind_of_padding)
    assert_close(output, expected)
    assert_same_gradients(gradients, wanted)


@pytest.mark.parametrize("kind_of_padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_causal_and_full_masks_have_no_values(name: str, kind_of_padding: str) -> None:
    """The compiled code computes no M x N tensor, unless there is padding."""
    sizes = set[tuple[int, ...]]()

    def read(graph: torch.fx.GraphModule, _: Any) -> Any:
        values = [node.meta.get("val") for node in graph.graph.nodes]
        sizes.update(tuple(x.shape[-2:]) for x in values if isinstance(x, Tensor))
        return graph

    model = build(name)
    model.forward = torch.compile(model.forward, backend=aot_autograd(fw_compiler=read))
    with torch.no_grad():
        model(**inputs(name, kind_of_padding)[0])
    assert ((LENGTH, LENGTH) in sizes) == (kind_of_padding != "none")


def test_inductor() -> None:
    model = build("gemma2")
    expected, wanted = run(model, "gemma2")
    model.forward = torch.compile(model.forward, fullgraph=True)
    output, gradients = run(model, "gemma2")
    assert_close(output, expected)
    assert_same_gradients(gradients, wanted)


@pytest.mark.parametrize("name", ["llama", "gemma3", "modernbert"])
def test_layers_that_are_compiled_alone(name: str) -> None:
    """The mask is made before: an input of the compiled functions."""
    model = build(name)
    expected, _ = run(model, name, "left")
    for layer in model.get_submodule("model").layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert_close(run(model, name, "left")[0], expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_decoding_with_a_static_cache_compiles_once(name: str) -> None:
    """Once for the prompt and once for every step."""
    model = build(name)
    arguments: dict[str, Any] = {
        "input_ids": tokens(9), "attention_mask": padding("left", 9), "max_new_tokens": 12,
        "do_sample": False, "eos_token_id": None,
    }  # fmt: skip
    expected = model.generate(**arguments)
    counter = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, fullgraph=True, backend=counter)
    found = model.generate(**arguments, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, expected)
    assert counter.frame_count == 2


def test_a_lazy_mask_as_an_input() -> None:
    """The values of its tensors are not part of the compiled code; other operations work."""

    def sliced(x: Tensor, mask: Tensor) -> Tensor:
        return x + mask[:, 0, -1, :, None]

    counter = CompileCounterWithBackend("aot_eager")
    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(sliced, backend=counter)
    x = torch.ones(2, 7, 1)
    for lengths in ([7, 2], [1, 4]):
        mask = Mask.padding(torch.tensor(lengths))
        lazy = LazyMask(mask, (2, 5, 7), torch.device("cpu"))
        assert torch.equal(compiled(x, lazy), sliced(x, lazy.clone()))


def test_export() -> None:
    """The exported graph has the operators, and no values of the example's padding."""
    model = build("llama")
    arguments, visible = inputs("llama", "right")
    assert visible is not None
    exported = torch.export.export(model, (), arguments | {"use_cache": False}, strict=False)
    other, visible = inputs("llama", "left")
    assert visible is not None
    found = exported.module()(**other | {"use_cache": False}).logits[visible.bool()]
    assert_close(found, model(**other).logits[visible.bool()])
