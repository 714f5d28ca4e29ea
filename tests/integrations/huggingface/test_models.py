"""Models of transformers: logits, gradients, generation and training agree with "eager"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.huggingface.tiny_models import (
    PADDINGS,
    TINY,
    assert_close,
    assert_same_gradients,
    build,
    inputs,
    names,
    padding,
    run,
    tokens,
    transformers,
)
from transformer_kernels.integrations.huggingface import NAME

pytestmark = pytest.mark.exhaustive  # `make test` does not install transformers


@pytest.mark.parametrize(
    ("name", "kind_of_padding"),
    [
        (name, kind_of_padding)
        for name, tiny in TINY.items()
        for kind_of_padding in (PADDINGS if tiny.kind != "image" else ("none",))
    ],
)
def test_outputs_and_gradients(name: str, kind_of_padding: str) -> None:
    model = build(name)
    assert model.config._attn_implementation == NAME
    output, gradients = run(model, name, kind_of_padding)
    model.set_attn_implementation("eager")
    expected, wanted = run(model, name, kind_of_padding)
    assert_close(output, expected)
    assert_same_gradients(gradients, wanted)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", names("decoder", "seq2seq"))
def test_generation(name: str, cache: str) -> None:
    """Past the sliding windows and chunks of the models; the prompts are padded on the left."""
    model = build(name)
    given: dict[str, Any] = {"input_ids": tokens(9), "attention_mask": padding("left", 9)}
    if name == "whisper":
        given = {"input_features": inputs(name, "none")[0]["input_features"]}
    model.generation_config.eos_token_id = None
    cache_implementation = None if cache == "dynamic" else cache

    def generated() -> Tensor:
        found: Tensor = model.generate(
            **given, max_new_tokens=10, do_sample=False, cache_implementation=cache_implementation
        )
        return found

    ours = generated()
    model.set_attn_implementation("eager")
    assert torch.equal(ours, generated())


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


def test_trainer(tmp_path: Path) -> None:
    """The losses of twelve steps, on texts that the collator pads."""
    library = transformers()
    pytest.importorskip("accelerate", reason="make test-all installs accelerate")
    generator = torch.Generator().manual_seed(4)
    texts = [
        {"input_ids": [3 + (first + step * j) % 50 for j in range(length)]}
        for first, step, length in torch.randint(2, 18, (24, 3), generator=generator).tolist()
    ]

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        rows_of_ids = [torch.tensor(row["input_ids"]) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(rows_of_ids, batch_first=True)
        return {
            "input_ids": ids,
            "attention_mask": (ids != 0).long(),
            "labels": ids.masked_fill(ids == 0, -100),
        }

    def losses(attn_implementation: str) -> list[float]:
        arguments = library.TrainingArguments(
            output_dir=tmp_path / attn_implementation,
            per_device_train_batch_size=4,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = build("gemma2", attn_implementation)
        trainer = library.Trainer(
            model=model, args=arguments, train_dataset=texts, data_collator=collate
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    ours, eager = losses(NAME), losses("eager")
    assert len(ours) == 12
    assert max(ours) > 1.1 * min(ours)
    assert ours == pytest.approx(eager, rel=1e-4)
