"""Reformer: logits and gradients equal those of transformers on the same weights and hashes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.huggingface import assert_same, reformer
from transformer_kernels.models import Reformer, ReformerConfig
from transformer_kernels.nn import reformer_blocks

pytestmark = pytest.mark.exhaustive

CONFIG = ReformerConfig(
    layers=3, heads=2, width=24, hidden=40, vocabulary=61, context=32, chunk=8, rounds=3, scale=1.0
)

NAMES = {
    "embedding": "reformer.embeddings.word_embeddings",
    "positions.columns": "reformer.embeddings.position_embeddings.embedding.weight",
    "last_norm": "reformer.encoder.layer_norm",
    "logits": "lm_head.decoder",
} | {
    f"blocks.{n}.{ours}": f"reformer.encoder.layers.{n}.{theirs}"
    for n in range(CONFIG.layers)
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


def ours_from(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> Reformer:
    """Our model with their weights and hashes."""
    ours = Reformer(CONFIG).double()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in ONLY_OURS:
                parameter.zero_()
            else:
                parameter.copy_(their_parameter(theirs, name))
    hashing = theirs.reformer.encoder.layers[0].attention.self_attention

    def hash_buckets(q: Tensor, *, rounds: int, **_: Any) -> Tensor:
        """Their buckets: those of a round are above those of the round before."""
        with torch.random.fork_rng(devices=[]):
            buckets: Tensor = hashing._hash_vectors(q, rounds, None)
        return torch.unflatten(buckets, 2, (rounds, -1))

    monkeypatch.setattr(reformer_blocks, "hash_buckets", hash_buckets)
    return ours


def test_logits_and_gradients_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four chunks in each of three rounds, all in one ring."""
    theirs = reformer(CONFIG).train()  # it refuses a backward pass in evaluation mode
    ours = ours_from(theirs, monkeypatch)
    text = torch.randint(1, 61, (2, 32), generator=torch.Generator().manual_seed(4))
    expected, found = theirs(text).logits, ours(text)
    assert_same(found, expected, tolerance=1e-9, name="logits")
    for logits in (expected, found):
        nn.functional.cross_entropy(logits.flatten(0, 1), text.flatten()).backward()
    for name, parameter in ours.named_parameters():
        if name in ONLY_OURS:
            continue
        wanted, gradient = their_parameter(theirs, name).grad, parameter.grad
        assert wanted is not None
        assert gradient is not None
        assert_same(gradient, wanted, tolerance=1e-9, name=name)
