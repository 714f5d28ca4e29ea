"""Models of transformers agree with "eager": outputs, gradients, generation, compiled code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from tests.integrations.huggingface.families import compare, families, recorded
from tests.integrations.huggingface.tiny_models import (
    LENGTH,
    assert_close,
    assert_same_run,
    build,
    generated,
    inputs,
    named_paddings,
    names,
    padding,
    run,
    tokens,
    transformers,
)
from transformer_kernels import Mask, enabled
from transformer_kernels.integrations import torch_sdpa, torch_switch
from transformer_kernels.integrations.huggingface import NAME, mask
from transformer_kernels.integrations.huggingface.lazy_mask import LazyMask

WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

pytestmark = pytest.mark.exhaustive  # `make test` does not install transformers


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "kind_of_padding"), named_paddings())
def test_outputs_and_gradients(name: str, kind_of_padding: str) -> None:
    model = build(name)
    assert model.config._attn_implementation == NAME
    found = run(model, name, kind_of_padding)
    model.set_attn_implementation("eager")
    assert_same_run(found, run(model, name, kind_of_padding))


@pytest.mark.parametrize("name", ["gemma3_images", "paligemma", "molmo2", "embedding_gemma"])
def test_blocks_of_images_take_no_dense_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mask, "_dense_mask")
    run(build(name), name, "left")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", names("decoder", "seq2seq"))
def test_generation(name: str, cache: str) -> None:
    """Past the sliding windows and chunks of the models; the prompts are padded on the left."""
    model = build(name)
    sounds = {"input_features": inputs(name, "none")[0].get("input_features")}
    prompts = sounds if name == "whisper" else None
    more = {} if cache == "dynamic" else {"cache_implementation": cache}
    ours = generated(model, prompts, **more)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, generated(model, prompts, **more))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prompt_in_parts(cache: str) -> None:
    """Several queries after cached keys, as in chunked prefill: causal from the offset."""
    model, text = build("mistral"), tokens(17)
    expected = model(text, use_cache=False).logits
    library = transformers()
    past = (
        library.DynamicCache(config=model.config)
        if cache == "dynamic"
        else library.StaticCache(config=model.config, max_cache_len=32)
    )
    parts = [model(part, past_key_values=past).logits for part in text.split([7, 6, 4], dim=1)]
    assert_close(torch.cat(parts, dim=1), expected)


def test_continuous_batching(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate_batch` accepts "sdpa" and no name of ours; `enabled()` replaces it, also in the
    thread of transformers."""
    model, calls = build("llama", "sdpa"), []
    ours = torch_sdpa.scaled_dot_product_attention

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return ours(*args, **options)

    monkeypatch.setattr(torch_switch, "scaled_dot_product_attention", counted)
    prompts = [text[:length].tolist() for text, length in zip(tokens(9), (9, 4, 6), strict=True)]
    greedy = transformers().GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    alone = [model.generate(torch.tensor([text]), greedy)[0, len(text) :] for text in prompts]
    with enabled():
        assert calls == []
        found = model.generate_batch(prompts, generation_config=greedy).values()
    assert [one.generated_tokens for one in found] == [text.tolist() for text in alone]
    assert calls != []


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    model = build(name).train()
    _, expected = run(model, name)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    _, gradients = run(model, name, use_cache=False)
    for key, wanted in expected.items():
        assert torch.equal(gradients[key], wanted), key


def test_dropout_is_drawn_from_torchs_generator() -> None:
    model = build("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0).train()
    torch.manual_seed(3)
    first, gradients = run(model, "bert")
    second, _ = run(model, "bert")
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    again, same = run(model, "bert")
    assert torch.equal(first, again)
    assert all(torch.equal(gradients[key], same[key]) for key in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "t5"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """No further from float32 than "eager" is, up to a factor of two."""
    model = build(name)
    exact, _ = run(model, name)
    model.to(dtype)
    ours, _ = run(model, name)
    model.set_attn_implementation("eager")
    eager, _ = run(model, name)
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max()


def test_autocast() -> None:
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = run(model, "llama")
        model.set_attn_implementation("eager")
        eager, _ = run(model, "llama")
    assert_close(ours.float(), eager.float(), tolerance=0.1)


Row = dict[str, list[int]]


def padded(rows: list[Row]) -> dict[str, Tensor]:
    """A batch of padded rows. The first token of a row has no label, as in flattened rows."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["input_ids"]) for row in rows], batch_first=True
    )
    labels = ids.masked_fill(ids == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "bert"])
def test_trainer(name: str, tmp_path: Path) -> None:
    """The losses of twelve steps: with padded rows, and with the same rows joined in one, whose
    boundaries the positions or the lengths tell; with recomputed layers too."""
    library = transformers()
    pytest.importorskip("accelerate", reason="make test-all installs accelerate")
    generator = torch.Generator().manual_seed(4)
    texts = [
        {"input_ids": [3 + (first + step * j) % 50 for j in range(length)]}
        for first, step, length in torch.randint(2, 18, (24, 3), generator=generator).tolist()
    ]

    def losses(attn_implementation: str, collator: Any, *, recompute: bool = False) -> list[float]:
        arguments = library.TrainingArguments(
            output_dir=tmp_path, per_device_train_batch_size=4,
            num_train_epochs=2, learning_rate=1e-2, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        model = build(name, attn_implementation, **WITHOUT_DROPOUT if name == "bert" else {})
        if recompute:
            model.gradient_checkpointing_enable()
        trainer = library.Trainer(
            model=model, args=arguments, train_dataset=texts, data_collator=collator
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    flattened = library.DataCollatorWithFlattening
    expected = losses("eager", padded)
    assert len(expected) == 12
    assert max(expected) > 1.1 * min(expected)
    with_lengths = flattened(return_flash_attn_kwargs=True)
    found = {
        "padded": losses(NAME, padded),
        "lengths": losses(NAME, with_lengths),
        "recomputed": losses(NAME, with_lengths, recompute=True),
    }
    if name != "bert":  # bidirectional modules do not read positions
        found["positions"] = losses(NAME, flattened())
    assert found == {kind: pytest.approx(expected, rel=1e-4) for kind in found}


@pytest.mark.parametrize(
    ("name", "kind_of_padding", "compiler"),
    [
        *(
            (name, kind, "aot_eager")
            for name in ("gpt2", "gemma2", "gpt_oss", "bert", "t5", "vit")
            for kind in ("none", "left")
        ),
        ("gemma2", "right", "inductor"),
    ],
)
def test_compiled_models(name: str, kind_of_padding: str, compiler: str) -> None:
    """Without graph breaks."""
    model = build(name)
    expected = run(model, name, kind_of_padding)
    model.forward = torch.compile(model.forward, fullgraph=True, backend=compiler)
    assert_same_run(run(model, name, kind_of_padding), expected)


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


@pytest.mark.parametrize(("family", "label"), recorded().items())
def test_outcome(family: str, label: str) -> None:
    transformers()
    outcome = compare(family)
    assert outcome.label == label, outcome.detail


def test_every_family_is_recorded() -> None:
    transformers()
    assert sorted(recorded()) == families()
