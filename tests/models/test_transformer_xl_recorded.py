"""Transformer-XL against HuggingFace's: log-probabilities and gradients over 20 segments.

`record_transformer_xl.py` made the file of results.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models.huggingface import assert_same, read
from tests.models.record_transformer_xl import (
    CASES,
    FILE,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Case,
)
from transformer_kernels.models import Memories, TransformerXL, TransformerXLConfig
from transformer_kernels.nn import AttnImplementation

MODEL = {
    "word_emb.emb_layers.0.weight": "embedding.weight",
    "crit.out_layers.0.bias": "logits_bias",
}
BLOCK = {
    "dec_attn.r_net.weight": "attention.distance_keys.weight",
    "dec_attn.o_net.weight": "attention.out_proj.weight",
    "dec_attn.layer_norm": "attention_norm",
    "pos_ff.CoreNet.0": "feed_forward.up_proj",
    "pos_ff.CoreNet.3": "feed_forward.down_proj",
    "pos_ff.layer_norm": "feed_forward_norm",
}
BIASES = {"r_w_bias": "content_bias", "r_r_bias": "position_bias"}


def ours(theirs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Our parameters, or their gradients, from those of HuggingFace's model."""
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    found = {name: theirs.pop(stored) for stored, name in MODEL.items()}
    for n in range(LAYERS):
        qkv = theirs.pop(f"layers.{n}.dec_attn.qkv_net.weight").chunk(3)
        for layer, weight in zip(("queries", "keys", "values"), qkv, strict=True):
            found[f"blocks.{n}.attention.{layer}.weight"] = weight
    for stored, name in BIASES.items():
        places = (
            [stored]
            if case.tied_biases
            else [f"layers.{n}.dec_attn.{stored}" for n in range(LAYERS)]
        )
        found[name] = torch.stack([theirs.pop(place) for place in places])
    for stored, tensor in theirs.items():
        _, number, layer = stored.split(".", maxsplit=2)
        (prefix,) = (prefix for prefix in BLOCK if layer.startswith(prefix))
        found[f"blocks.{number}.{BLOCK[prefix]}{layer.removeprefix(prefix)}"] = tensor
    return found


def model(case: Case, implementation: AttnImplementation) -> TransformerXL:
    config = TransformerXLConfig(
        layers=LAYERS, heads=HEADS, width=WIDTH, head_size=HEAD_SIZE, hidden=HIDDEN,
        vocabulary=VOCABULARY, context=LENGTH, memory=case.memory, dropout=0.0,
        norm="pre" if case.norm == "pre" else "post", tied_biases=case.tied_biases,
        clamp=case.clamp, same_length=case.same_length,
    )  # fmt: skip
    transformer = TransformerXL(config, attn_implementation=implementation).double()
    transformer.last_norm = nn.Identity()  # the original has none before its projection
    return transformer


@pytest.mark.parametrize("implementation", get_args(AttnImplementation))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_probabilities_and_gradients(case: Case, implementation: AttnImplementation) -> None:
    recorded = {
        name.removeprefix(f"{case.name}/"): tensor
        for name, tensor in read(FILE).items()
        if name.startswith(f"{case.name}/")
    }
    weights, gradients = (
        {
            name.removeprefix(prefix): tensor
            for name, tensor in recorded.items()
            if name.startswith(prefix)
        }
        for prefix in ("weights.", "gradients.")
    )
    transformer = model(case, implementation)
    transformer.load_state_dict(ours(weights, case))
    # The original's memories begin as vectors of zeros, which are visible.
    shape = (recorded["tokens"].shape[1], case.memory, WIDTH)
    memories: Memories = (torch.zeros(shape, dtype=torch.float64),) * LAYERS
    results = []
    for segment, target in zip(recorded["tokens"], recorded["targets"], strict=True):
        logits, memories = transformer(segment, memories)
        results.append(logits.detach().log_softmax(dim=-1))
        nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    assert_same(torch.stack(results), recorded["log_probabilities"], tolerance=1e-12)
    expected = ours(gradients, case)
    for name, parameter in transformer.named_parameters():
        assert parameter.grad is not None
        assert_same(parameter.grad, expected.pop(name), tolerance=1e-11, name=name)
    assert not expected
