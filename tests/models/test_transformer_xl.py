"""Transformer-XL: HuggingFace's results, memories, dropout and dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.huggingface import Tensors, assert_same, read
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
from tests.models.zoo import IMPLEMENTATIONS, XL, by_state, entry_of, gradients
from tests.models.zoo import tokens as text
from tests.support.tiers import each
from transformer_kernels import RelativeKeys
from transformer_kernels.models import (
    TRANSFORMER_XL_SIZES,
    Memories,
    TransformerXL,
    TransformerXLConfig,
)
from transformer_kernels.nn import (
    AttnImplementation,
    attend,
    distance_sinusoids,
    relative_attention,
)


def model(implementation: AttnImplementation = "fused", **changes: Any) -> TransformerXL:
    transformer = entry_of("xl").build(implementation, **{"memory": 5} | changes)
    assert isinstance(transformer, TransformerXL)
    return transformer


def tokens(length: int, batch: int = 2) -> Tensor:
    return text(length, batch)


def by_segments(transformer: TransformerXL, text: Tensor, length: int) -> Tensor:
    """Logits of a text (B, T) that is read in segments."""
    return by_state(transformer, text, [length] * (text.shape[1] // length))


# HuggingFace's results


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


def beginning(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose names begin with a prefix, without it."""
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}


def our_names(theirs: Tensors, case: Case) -> Tensors:
    """Our parameters, or their gradients, from those of HuggingFace's model."""
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    found = {name: theirs.pop(stored) for stored, name in MODEL.items()}
    for n in range(LAYERS):
        qkv = theirs.pop(f"layers.{n}.dec_attn.qkv_net.weight").chunk(3)
        for layer, weight in zip(("queries", "keys", "values"), qkv, strict=True):
            found[f"blocks.{n}.attention.{layer}.weight"] = weight
    for stored, name in BIASES.items():
        apart = [f"layers.{n}.dec_attn.{stored}" for n in range(LAYERS)]
        places = [stored] if case.tied_biases else apart
        found[name] = torch.stack([theirs.pop(place) for place in places])
    for stored, tensor in theirs.items():
        _, number, layer = stored.split(".", maxsplit=2)
        (prefix,) = (prefix for prefix in BLOCK if layer.startswith(prefix))
        found[f"blocks.{number}.{BLOCK[prefix]}{layer.removeprefix(prefix)}"] = tensor
    return found


def model_of(case: Case, implementation: AttnImplementation) -> TransformerXL:
    config = TransformerXLConfig(
        layers=LAYERS, heads=HEADS, width=WIDTH, head_size=HEAD_SIZE, hidden=HIDDEN,
        vocabulary=VOCABULARY, context=LENGTH, memory=case.memory, dropout=0.0,
        norm="pre" if case.norm == "pre" else "post", tied_biases=case.tied_biases,
        clamp=case.clamp, same_length=case.same_length,
    )  # fmt: skip
    transformer = TransformerXL(config, attn_implementation=implementation).double()
    transformer.last_norm = nn.Identity()  # the original has none before its projection
    return transformer


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_probabilities_and_gradients_are_those_of_huggingface(
    case: Case, implementation: AttnImplementation
) -> None:
    """Over 20 segments; `record_transformer_xl.py` made the file of results."""
    recorded = beginning(f"{case.name}/", read(FILE))
    weights, expected = (
        our_names(beginning(prefix, recorded), case) for prefix in ("weights.", "gradients.")
    )
    transformer = model_of(case, implementation)
    transformer.load_state_dict(weights)
    # The original's memories begin as vectors of zeros, which are visible.
    shape = (recorded["tokens"].shape[1], case.memory, WIDTH)
    memories: Memories = (torch.zeros(shape, dtype=torch.float64),) * LAYERS
    results = []
    for segment, target in zip(recorded["tokens"], recorded["targets"], strict=True):
        logits, memories = transformer(segment, memories)
        results.append(logits.detach().log_softmax(dim=-1))
        nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    assert_same(torch.stack(results), recorded["log_probabilities"], tolerance=1e-12)
    for name, parameter in transformer.named_parameters():
        assert parameter.grad is not None
        assert_same(parameter.grad, expected.pop(name), tolerance=1e-11, name=name)
    assert not expected


def test_pre_norm_blocks_end_in_a_normalisation() -> None:
    for norm, last in (("pre", nn.LayerNorm), ("post", nn.Identity)):
        transformer = model(norm=norm)
        assert isinstance(transformer.last_norm, last)
        logits, _ = transformer(tokens(5))
        transformer.last_norm = nn.Identity()
        assert torch.equal(transformer(tokens(5))[0], logits) == (norm == "post")


# Memories


def test_memories_are_the_last_inputs_of_each_layer_without_a_gradient() -> None:
    transformer = model(memory=8)
    inputs: list[Tensor] = []
    for block in transformer.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    _, memories = transformer(tokens(10)[:, :5])
    _, memories = transformer(tokens(10)[:, 5:], memories)
    for n, memory in enumerate(memories):
        expected = torch.cat([inputs[n], inputs[2 + n]], dim=1)[:, -8:]
        torch.testing.assert_close(memory, expected.detach(), rtol=0, atol=0)
        assert not memory.requires_grad
        assert memory.untyped_storage().nbytes() == memory.nbytes


@each(("kept", "given", "lengths"), [(8, None, [5, 8, 8]), (0, None, [0, 0, 0]), (8, 6, [5, 6, 6])])
def test_memories_grow_to_their_length(kept: int, given: int | None, lengths: list[int]) -> None:
    transformer = model(memory=kept)
    memories, found = transformer.new_state(2), []
    for segment in tokens(15).split(5, dim=1):
        _, memories = transformer(segment, memories, memory=given)
        found.append(memories[0].shape[1])
        assert [tuple(each.shape) for each in memories] == [(2, found[-1], 10)] * 2
    assert found == lengths


def test_config_is_replaced_for_evaluation() -> None:
    trained = model()
    options: dict[str, Any] = {"memory": 9, "clamp": 3, "same_length": True}
    expected = by_segments(model(**options), tokens(15), 3)
    plain = by_segments(trained, tokens(15), 3)
    trained.config = replace(trained.config, **options)
    found = by_segments(trained, tokens(15), 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.isclose(found, plain).all()


def test_layers_share_one_dropped_set_of_encodings() -> None:
    transformer = model(dropout=0.5, layers=3)
    seen: list[Tensor] = []
    for block in transformer.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    transformer(tokens(5))
    expected = 2 * distance_sinusoids(5, 10)
    dropped = seen[0] == 0
    assert 0.2 < dropped.double().mean() < 0.8
    torch.testing.assert_close(seen[0], expected.masked_fill(dropped, 0.0))
    assert all(each is seen[0] for each in seen)


def test_attention_weights_are_dropped_in_training_only() -> None:
    transformer = model(attention_dropout=0.5)
    expected, _ = model()(tokens(5))
    assert not torch.isclose(transformer(tokens(5))[0], expected).all(dim=-1).any()
    transformer.eval()
    torch.testing.assert_close(transformer(tokens(5))[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_narrows_every_operand_of_the_attention(
    implementation: AttnImplementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: set[torch.dtype] = set()

    def recorded(*operands: Tensor, relative: RelativeKeys, **options: Any) -> Tensor:
        dtypes.update(each.dtype for each in (*operands, relative.keys))
        return attend(*operands, relative=relative, **options)

    monkeypatch.setattr(relative_attention, "attend", recorded)
    transformer = model(implementation).float()
    expected = by_segments(transformer, tokens(10), 5).detach()
    assert dtypes == {torch.float32}
    dtypes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        logits = by_segments(transformer, tokens(10), 5)
    gradients(transformer, logits)
    assert dtypes == {torch.bfloat16}
    error = (logits - expected).norm() / expected.norm()
    assert error < 0.05


def test_distances_beyond_256_stay_exact_in_bfloat16() -> None:
    """bfloat16 represents whole numbers exactly up to 256."""
    transformer = model().to(torch.bfloat16)
    seen: list[Tensor] = []
    transformer.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    transformer(tokens(600, batch=1))
    for e in (255, 257, 599):
        expected = distance_sinusoids(600, 10)[e]
        torch.testing.assert_close(seen[0][e].double(), expected, rtol=0, atol=2**-8)


def test_invalid_memories_raise() -> None:
    transformer = model()
    memory = torch.zeros(2, 4, 10).double()
    for memories, found in (
        ((memory,), r"\[\(2, 4, 10\)\]"),
        ((memory, memory[:, 1:]), r"\[\(2, 4, 10\), \(2, 3, 10\)\]"),
        ((memory[:1], memory[:1]), r"\[\(1, 4, 10\), \(1, 4, 10\)\]"),
        ((memory[0], memory[0]), r"\[\(4, 10\), \(4, 10\)\]"),
        ((), r"\[\]"),
    ):
        with pytest.raises(ValueError, match=rf"memories must be 2 tensors .* got shapes {found}"):
            transformer(tokens(5), memories)
    with pytest.raises(ValueError, match="memory must be a whole number of at least 0, got -1"):
        transformer(tokens(5), memory=-1)
    transformer.config = replace(XL, same_length=True)
    for call in (
        lambda: transformer(tokens(5), memory=0),
        lambda: replace(XL, memory=0, same_length=True),
    ):
        with pytest.raises(ValueError, match="memory must be at least 1 with same_length"):
            call()


def test_head_size_defaults_to_the_width_over_the_heads() -> None:
    config = TransformerXLConfig(layers=1, heads=4, width=24, context=8, memory=8)
    assert config.size_of_a_head() == 6
    assert TRANSFORMER_XL_SIZES["wt103-base"].size_of_a_head() == 41
