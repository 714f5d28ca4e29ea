"""Logits and gradients of HuggingFace's models on the same weights, read from their own files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import huggingface
from tests.models.huggingface import assert_same, t5_tensors
from tests.models.zoo import (
    IMPLEMENTATIONS,
    LENGTHS,
    T5_CONFIG,
    T5_V1_1,
    TARGET,
    combination,
    tokens,
)
from tests.support.runtime import default_dtype
from transformer_kernels.models import (
    GPT2,
    T5,
    BertForClassification,
    BertForPreTraining,
    Reformer,
    ReformerConfig,
)
from transformer_kernels.nn import AttnImplementation, reformer_blocks

pytestmark = pytest.mark.exhaustive

VISIBLE = torch.arange(9) < LENGTHS[:, None]
SEGMENTS = (torch.arange(9) >= torch.tensor([[3], [5], [2]])).long()
"""The second text starts at a different position in each row."""


@dataclass(frozen=True)
class Case:
    """A model of HuggingFace and its counterpart, and their results on the same text."""

    theirs: Callable[[torch.dtype], Any]
    load: Callable[..., Any]
    run_theirs: Callable[[Any], tuple[Tensor, ...]]
    run_ours: Callable[[Any], tuple[Tensor, ...]]


def loss(*results: Tensor) -> Tensor:
    """A combination of the mean over the rows, in size like a cross-entropy."""
    return combination(*(x * x.shape[-1] / x.numel() for x in results))


def their_bert(model: Any) -> Any:
    return model(tokens(), attention_mask=VISIBLE.long(), token_type_ids=SEGMENTS)


def our_bert(model: Any) -> Any:
    return model(tokens(), segments=SEGMENTS, lengths=LENGTHS)


def t5_case(config: Any) -> Case:
    def run_theirs(model: Any) -> tuple[Tensor, ...]:
        mask = VISIBLE.long()
        return (model(input_ids=tokens(), attention_mask=mask, decoder_input_ids=TARGET).logits,)

    return Case(
        partial(huggingface.t5, config),
        partial(T5.from_safetensors, max_distance=5),
        run_theirs,
        lambda model: (model(tokens(), TARGET, LENGTHS),),
    )


def run_their_pre_training(model: Any) -> tuple[Tensor, ...]:
    outputs = their_bert(model)
    return outputs.prediction_logits[VISIBLE], outputs.seq_relationship_logits


def run_our_pre_training(model: Any) -> tuple[Tensor, ...]:
    logits = our_bert(model)
    return logits.tokens[VISIBLE], logits.next_sentence


CASES = {
    "gpt2": Case(
        huggingface.gpt2,
        GPT2.from_safetensors,
        lambda model: (model(tokens(20)).logits,),
        lambda model: (model(tokens(20)),),
    ),
    "gpt2-heads-of-16": Case(
        partial(huggingface.gpt2, n_embd=48, n_head=3),
        partial(GPT2.from_safetensors, heads=3),
        lambda model: (model(tokens()).logits,),
        lambda model: (model(tokens()),),
    ),
    "pre-training": Case(
        partial(huggingface.bert, "BertForPreTraining"),
        BertForPreTraining.from_safetensors,
        run_their_pre_training,
        run_our_pre_training,
    ),
    "classification": Case(
        partial(huggingface.bert, "BertForSequenceClassification", num_labels=5),
        BertForClassification.from_safetensors,
        lambda model: (their_bert(model).logits,),
        lambda model: (our_bert(model),),
    ),
    "t5": t5_case(T5_CONFIG),
    "t5-v1.1": t5_case(T5_V1_1),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str
)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_results_and_gradients(
    case: Case,
    dtype: torch.dtype,
    tolerance: float,
    implementation: AttnImplementation,
    tmp_path: Path,
) -> None:
    theirs = case.theirs(dtype)
    expected = case.run_theirs(theirs)
    loss(*expected).backward()
    with default_dtype(dtype):
        file = huggingface.saved(theirs, tmp_path)
        ours = case.load(file, attn_implementation=implementation)
        gradients = case.load(huggingface.saved_gradients(theirs, tmp_path))
    found = case.run_ours(ours)
    loss(*found).backward()
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y, tolerance=tolerance)
    huggingface.assert_same_gradients(ours, gradients, tolerance=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("config", [T5_CONFIG, T5_V1_1], ids=["t5", "t5-v1.1"])
def test_greedy_targets_of_t5(
    config: Any, implementation: AttnImplementation, tmp_path: Path
) -> None:
    theirs = huggingface.t5(replace(config, decoder_layers=2))
    with torch.no_grad():  # otherwise the first token repeats
        for name, parameter in theirs.named_parameters():
            if "norm" in name or "relative_attention_bias" in name:
                parameter.mul_(3.0)
    generated = theirs.generate(
        input_ids=tokens(),
        attention_mask=VISIBLE.long(),
        do_sample=False,
        num_beams=1,
        max_new_tokens=25,
    )
    expected = [row[1:] for row in generated.tolist()]
    file = huggingface.saved(theirs, tmp_path)
    with default_dtype(torch.float64):
        ours = T5.from_safetensors(file, max_distance=5, attn_implementation=implementation)
    for cached in (True, False):
        found = ours.generate(tokens(), LENGTHS, most=25, cached=cached)
        assert found == [row[: row.index(1)] if 1 in row else row for row in expected]
    assert len({token for row in expected for token in row}) > 2


@pytest.mark.parametrize("config", [T5_CONFIG, T5_V1_1], ids=["t5", "t5-v1.1"])
def test_file_of_t5_has_the_names_of_the_formulas(config: Any, tmp_path: Path) -> None:
    tensors = huggingface.read(huggingface.saved(huggingface.t5(config), tmp_path))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes == {name: tensor.shape for name, tensor in t5_tensors(config).items()}


# Reformer, without published files


REFORMER = ReformerConfig(
    layers=3, heads=2, width=24, hidden=40, vocabulary=61, context=32, chunk=8, rounds=3, scale=1.0
)
NAMES = {
    "embedding": "reformer.embeddings.word_embeddings",
    "positions.columns": "reformer.embeddings.position_embeddings.embedding.weight",
    "last_norm": "reformer.encoder.layer_norm",
    "logits": "lm_head.decoder",
} | {
    f"blocks.{n}.{ours}": f"reformer.encoder.layers.{n}.{theirs}"
    for n in range(REFORMER.layers)
    for ours, theirs in {
        "attention_norm": "attention.layer_norm",
        "attention.queries": "attention.self_attention.query_key",
        "attention.values": "attention.self_attention.value",
        "attention.out_proj": "attention.output.dense",
        "feed_forward_norm": "feed_forward.layer_norm",
        "feed_forward.up_proj": "feed_forward.dense.dense",
        "feed_forward.down_proj": "feed_forward.output.dense",
    }.items()
}
"""Their names of our parameters, or of the modules that hold them"""
ONLY_OURS = ("positions.rows", "logits.bias")
"""Encodings of the one row; and a bias that theirs has, but does not add"""


def their_parameter(theirs: nn.Module, name: str) -> nn.Parameter:
    """Their counterpart of our parameter `name`."""
    if name in NAMES:
        return theirs.get_parameter(NAMES[name])
    module, _, own = name.rpartition(".")
    return theirs.get_parameter(f"{NAMES[module]}.{own}")


def test_results_and_gradients_of_reformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their hashes: four chunks in each of three rounds, all in one ring."""
    theirs = huggingface.reformer(REFORMER).train()  # no backward pass in evaluation mode
    hashing = theirs.reformer.encoder.layers[0].attention.self_attention

    def hash_buckets(q: Tensor, *, rounds: int, **_: Any) -> Tensor:
        """Their buckets: those of a round are above those of the round before."""
        with torch.random.fork_rng(devices=[]):
            buckets: Tensor = hashing._hash_vectors(q, rounds, None)
        return torch.unflatten(buckets, 2, (rounds, -1))

    monkeypatch.setattr(reformer_blocks, "hash_buckets", hash_buckets)
    ours = Reformer(REFORMER).double()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in ONLY_OURS:
                parameter.zero_()
            else:
                parameter.copy_(their_parameter(theirs, name))
    text = tokens(32, 2)
    expected, found = theirs(text).logits, ours(text)
    assert_same(found, expected, tolerance=1e-9, name="logits")
    loss(expected).backward()
    loss(found).backward()
    for name, parameter in ours.named_parameters():
        if name not in ONLY_OURS:
            wanted, gradient = their_parameter(theirs, name).grad, parameter.grad
            assert wanted is not None
            assert gradient is not None
            assert_same(gradient, wanted, tolerance=1e-9, name=name)
