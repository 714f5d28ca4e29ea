"""T5: agreement with its formulas for every implementation, visibility, padding and generation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models import huggingface
from tests.models.t5_by_formula import T5ByFormula, random_tensors
from tests.support.tiers import each
from transformer_kernels import attention_decode
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import T5, T5_SIZES, T5Config
from transformer_kernels.nn import (
    AttnImplementation,
    BucketedBias,
    Stack,
    T5Attention,
    T5Block,
    recompute_blocks,
)
from transformer_kernels.nn import attention as cache_module

TINY = T5Config(
    layers=2, decoder_layers=3, heads=3, width=10, head_size=5, hidden=14, vocabulary=31,
    buckets=6, max_distance=5, dropout=0.0,
)  # fmt: skip
"""Distances beyond max_distance occur in texts of 7 tokens."""
V1_1 = replace(TINY, activation="gated_gelu", tied_embeddings=False)
CONFIGS = pytest.mark.parametrize("config", [TINY, V1_1], ids=["t5", "t5-v1.1"])
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
EACH = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
LENGTHS = torch.tensor([9, 1, 6])
TARGET_LENGTHS = torch.tensor([4, 11, 2])


def texts(lengths: Tensor, seed: int) -> Tensor:
    """(3, longest): random texts with trailing padding of 0."""
    longest = int(lengths.max())
    text = torch.randint(2, 31, (3, longest), generator=torch.Generator().manual_seed(seed))
    return text.where(torch.arange(longest) < lengths[:, None], 0)


SOURCE, TARGET = texts(LENGTHS, 1), texts(TARGET_LENGTHS, 2)
IS_TARGET = torch.arange(11) < TARGET_LENGTHS[:, None]


def model(config: T5Config = TINY, attn_implementation: AttnImplementation = "fused") -> T5:
    """A model with large weights, because a new model's attention is almost uniform."""
    t5 = T5(config, attn_implementation=attn_implementation).double()
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in t5.parameters():
            parameter.normal_(std=0.4)
    return t5


def loss(logits: Tensor) -> Tensor:
    """Loss of predicting each token of TARGET from those before it, without the padding."""
    kept = IS_TARGET[:, 1:]
    return nn.functional.cross_entropy(logits[:, :-1][kept], TARGET[:, 1:][kept])


def gradients(t5: T5, logits: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(logits), list(t5.parameters()))


# Agreement


@EACH
@CONFIGS
def test_loaded_model_matches_the_formulas(
    config: T5Config, implementation: AttnImplementation, tmp_path: Path
) -> None:
    tensors = random_tensors(config)
    with huggingface.default_dtype(torch.float64):
        t5 = T5.from_safetensors(
            huggingface.write(tensors, tmp_path),
            max_distance=5,
            dropout=0.0,
            attn_implementation=implementation,
        )
    assert t5.config == config
    logits = t5(SOURCE, TARGET, LENGTHS)
    formula = T5ByFormula(tensors, config)
    for b, length in enumerate(LENGTHS.tolist()):
        assert_same_function(logits[b], formula.logits(SOURCE[b, :length], TARGET[b]))


@CONFIGS
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "padded"])
def test_implementations_agree_in_logits_and_gradients(
    config: T5Config, lengths: Tensor | None
) -> None:
    results = []
    for implementation in IMPLEMENTATIONS:
        t5 = model(config, implementation)
        logits = t5(SOURCE, TARGET, lengths)
        results.append((logits, *gradients(t5, logits)))
    assert results[0][0].shape == (3, 11, 31)
    assert_same_function(results[1], results[0])
    assert_same_function(results[2], results[0])
    names = [name for name, _ in model(config).named_parameters()]
    for stack in ("encoder", "decoder"):
        assert results[0][1 + names.index(f"{stack}.positions.table")].abs().max() > 1e-4


@EACH
def test_every_attention_uses_the_selected_implementation(
    implementation: AttnImplementation,
) -> None:
    modules = model(attn_implementation=implementation).modules()
    implementations = [
        each.attn_implementation for each in modules if isinstance(each, T5Attention)
    ]
    assert implementations == [implementation] * (2 + 2 * 3)


@pytest.mark.exhaustive
@EACH
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str
)
@CONFIGS
def test_logits_and_gradients_match_huggingface(
    config: T5Config,
    dtype: torch.dtype,
    tolerance: float,
    implementation: AttnImplementation,
    tmp_path: Path,
) -> None:
    theirs = huggingface.t5(config, dtype)
    expected = theirs(
        input_ids=SOURCE,
        attention_mask=(torch.arange(9) < LENGTHS[:, None]).long(),
        decoder_input_ids=TARGET,
        decoder_attention_mask=IS_TARGET.long(),
    ).logits
    loss(expected).backward()
    with huggingface.default_dtype(dtype):
        file = huggingface.saved(theirs, tmp_path)
        ours = T5.from_safetensors(file, max_distance=5, attn_implementation=implementation)
        gradients = T5.from_safetensors(huggingface.saved_gradients(theirs, tmp_path))
    logits = ours(SOURCE, TARGET, LENGTHS)
    loss(logits).backward()
    huggingface.assert_same(logits[IS_TARGET], expected[IS_TARGET], tolerance=tolerance)
    huggingface.assert_same_gradients(ours, gradients, tolerance=tolerance)


@pytest.mark.exhaustive
@EACH
@CONFIGS
def test_greedy_tokens_match_huggingface(
    config: T5Config, implementation: AttnImplementation, tmp_path: Path
) -> None:
    theirs = huggingface.t5(replace(config, decoder_layers=2))
    vary_tokens(theirs)
    generated = theirs.generate(
        input_ids=SOURCE,
        attention_mask=(torch.arange(9) < LENGTHS[:, None]).long(),
        do_sample=False,
        num_beams=1,
        max_new_tokens=25,
    )
    expected = [row[1:] for row in generated.tolist()]
    with huggingface.default_dtype(torch.float64):
        ours = T5.from_safetensors(
            huggingface.saved(theirs, tmp_path),
            max_distance=5,
            attn_implementation=implementation,
        )
    for cached in (True, False):
        tokens = ours.generate(SOURCE, LENGTHS, most=25, cached=cached)
        assert tokens == [row[: row.index(1)] if 1 in row else row for row in expected]
    assert len({token for row in expected for token in row}) > 4


@pytest.mark.exhaustive
@CONFIGS
def test_file_of_huggingface_has_the_names_of_the_formulas(
    config: T5Config, tmp_path: Path
) -> None:
    tensors = huggingface.read(huggingface.saved(huggingface.t5(config), tmp_path))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes == {name: tensor.shape for name, tensor in random_tensors(config).items()}


# Visibility and padding


@EACH
def test_later_target_tokens_do_not_change_earlier_rows(
    implementation: AttnImplementation,
) -> None:
    t5 = model(attn_implementation=implementation)
    changed = TARGET.clone()
    changed[:, 7:] = (TARGET[:, 7:] + 1) % 31
    before, after = (t5(SOURCE, target, LENGTHS) for target in (TARGET, changed))
    assert_same_function(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


@EACH
def test_every_row_depends_on_the_whole_source(implementation: AttnImplementation) -> None:
    t5 = model(attn_implementation=implementation)
    changed = SOURCE.clone()
    changed[torch.arange(3), LENGTHS - 1] = 1
    before, after = (t5(source, TARGET, LENGTHS) for source in (SOURCE, changed))
    assert not torch.isclose(before, after).all(dim=-1).any()


@EACH
def test_source_padding_is_not_attended_to(implementation: AttnImplementation) -> None:
    """A padded source gives the same logits and gradients as alone, for any padding token."""
    t5 = model(attn_implementation=implementation)
    padded = t5(SOURCE, TARGET, LENGTHS)
    alone = torch.cat(
        [
            t5(SOURCE[b : b + 1, :length], TARGET[b : b + 1])
            for b, length in enumerate(LENGTHS.tolist())
        ]
    )
    assert_same_function(padded, alone)
    assert_same_function(gradients(t5, padded), gradients(t5, alone))
    other = SOURCE.where(torch.arange(9) < LENGTHS[:, None], 7)
    assert torch.equal(t5(other, TARGET, LENGTHS), padded)


@EACH
def test_nan_in_source_padding_reaches_no_result_and_no_gradient(
    implementation: AttnImplementation,
) -> None:
    t5 = model(V1_1, implementation)
    target = TARGET.where(IS_TARGET, 5)
    clean = t5(SOURCE, target, LENGTHS)
    expected = (clean, *gradients(t5, clean))
    with torch.no_grad():
        t5.embedding.weight[0] = math.nan
    poisoned = t5(SOURCE, target, LENGTHS)
    assert_same_function((poisoned, *gradients(t5, poisoned)), expected)


@EACH
def test_source_of_length_0_gives_finite_results(implementation: AttnImplementation) -> None:
    t5 = model(attn_implementation=implementation)
    logits = t5(SOURCE, TARGET, torch.tensor([5, 0, 3]))
    assert logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(t5, logits))
    assert_same_function(t5(SOURCE[1:2, :0], TARGET[1:2]), logits[1:2])


# Generation


@pytest.mark.quick
@EACH
@CONFIGS
def test_cache_changes_neither_logits_nor_tokens(
    config: T5Config, implementation: AttnImplementation
) -> None:
    t5 = model(config, implementation)
    vary_tokens(t5)
    with torch.no_grad():
        memory = t5.memory(SOURCE, LENGTHS)
        cache = t5.new_cache(3, 12)
        parts = [t5.decode(part, memory, cache=cache) for part in TARGET.split([4, 1, 6], dim=1)]
    assert cache.capacity == 12
    assert_same_function(torch.cat(parts, dim=1), t5(SOURCE, TARGET, LENGTHS))

    for end in (1, 8):
        expected = [by_hand(t5, SOURCE[b, :n], end) for b, n in enumerate(LENGTHS.tolist())]
        for cached in (True, False):
            generated = t5.generate(SOURCE, LENGTHS, most=20, begin=2, end=end, cached=cached)
            assert generated == expected
    assert len({token for row in expected for token in row}) > 4


def by_hand(t5: T5, source: Tensor, end: int) -> list[int]:
    """Greedy target of one source, from `forward` on the whole text at each step."""
    text = [2]
    while len(text) <= 20:
        text.append(int(t5(source[None], torch.tensor([text]))[0, -1].argmax()))
        if text[-1] == end:
            return text[1:-1]
    return text[1:]


def vary_tokens(t5: nn.Module) -> None:
    """Scales norms and buckets, so that generated tokens do not repeat from the first one on."""
    with torch.no_grad():
        for name, parameter in t5.named_parameters():
            if "norm" in name or "relative_attention_bias" in name or "table" in name:
                parameter.mul_(3.0)


def test_fused_decoding_stores_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step passes the table of distances to `attention_decode`, in each layer."""
    calls: list[tuple[int, ...]] = []

    def record(*args: Any, **options: Any) -> Tensor:
        calls.append(tuple(options["relative"].table.shape))
        o: Tensor = attention_decode(*args, **options)
        return o

    monkeypatch.setattr(cache_module, "attention_decode", record)
    model().generate(SOURCE, LENGTHS, most=4, end=30)
    assert calls == [(3, 6)] * (3 * 4)


def test_generation_restores_the_training_mode() -> None:
    t5 = model(replace(TINY, dropout=0.5))
    assert t5.generate(SOURCE, most=9) == t5.generate(SOURCE, most=9)
    assert t5.training
    t5.eval().generate(SOURCE, most=1)
    assert not t5.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most": 0}, "most must be a whole number of at least 1, got 0"),
        ({"begin": 31}, "begin must be a token from 0 to 30, got 31"),
        ({"end": -1}, "end must be a token from 0 to 30, got -1"),
        ({"source_lengths": LENGTHS + 1}, "source_lengths must be from 0 to 9, .* got 10 at"),
    ],
)
def test_invalid_arguments_raise_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().generate(SOURCE, **{"most": 5} | changes)


# Parameters, dropout and sizes


def test_tied_embedding_is_one_parameter() -> None:
    """Its gradient is the sum over its three uses; untied, the projection is another."""
    tied = model()
    assert [name for name, p in tied.named_parameters() if 31 in p.shape] == ["embedding.weight"]
    apart = model(replace(TINY, tied_embeddings=False))
    assert apart.projection is not None
    weights = tied.state_dict()
    scaled = weights["embedding.weight"] / math.sqrt(10)
    apart.load_state_dict(weights | {"projection.weight": scaled})
    logits = [t5(SOURCE, TARGET, LENGTHS) for t5 in (tied, apart)]
    assert_same_function(logits[0], logits[1])
    loss(logits[0]).backward()
    loss(logits[1]).backward()
    assert apart.embedding.weight.grad is not None
    assert apart.projection.weight.grad is not None
    total = apart.embedding.weight.grad + apart.projection.weight.grad / math.sqrt(10)
    assert_same_function(tied.embedding.weight.grad, total)


def test_each_stack_has_one_table_of_buckets() -> None:
    shapes = [tuple(p.shape) for name, p in model().named_parameters() if "table" in name]
    assert shapes == [(6, 3)] * 2
    encoder, decoder = (each for each in model().modules() if isinstance(each, BucketedBias))
    assert (encoder.lowest, decoder.lowest) == (-5, 0)


@each(
    ("name", "count"),
    [
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-3b", 2_851_598_336),
        ("t5-11b", 11_307_321_344),
        ("t5-v1.1-small", 76_961_152),
        ("t5-v1.1-base", 247_577_856),
        ("t5-v1.1-large", 783_150_080),
        ("t5-v1.1-xl", 2_849_757_184),
        ("t5-v1.1-xxl", 11_135_332_352),
    ],
)
def test_named_sizes_have_the_published_parameter_counts(name: str, count: int) -> None:
    with torch.device("meta"):
        t5 = T5(T5_SIZES[name])
    assert sum(parameter.numel() for parameter in t5.parameters()) == count


def test_dropout_applies_in_training_only_and_to_every_part() -> None:
    t5 = model(replace(TINY, dropout=0.5))
    assert not torch.allclose(t5(SOURCE, TARGET), t5(SOURCE, TARGET))
    for block in (*t5.encoder.blocks, *t5.decoder.blocks):
        assert isinstance(block, T5Block)
        assert block.dropout.p == block.feed_forward.dropout.p == block.attention.dropout == 0.5
        assert block.memory_attention is None or block.memory_attention.dropout == 0.5
    assert torch.equal(t5.eval()(SOURCE, TARGET), t5(SOURCE, TARGET))
    for stack in (t5.train().encoder, t5.decoder):
        stack.blocks = Stack()
        dropped = (stack(torch.ones(3, 40, 10).double()) == 0).double().mean()
        assert 0.7 < dropped < 0.8  # of the embeddings and of the result


def test_recomputed_blocks_match_plain_blocks() -> None:
    results = []
    for recompute in (False, True):
        t5 = model(replace(TINY, dropout=0.3))
        recompute_blocks(t5, recompute)
        torch.manual_seed(3)
        logits = t5(SOURCE, TARGET, LENGTHS)
        results.append((logits, *gradients(t5, logits)))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_new_model_has_logits_of_unit_size() -> None:
    torch.manual_seed(0)
    small = {"width": 128, "head_size": 32, "hidden": 256, "heads": 4, "vocabulary": 500}
    for config in (TINY, V1_1):
        t5 = T5(replace(config, **small))  # type: ignore[arg-type]
        text = torch.randint(500, (2, 30), generator=torch.Generator().manual_seed(1))
        assert t5(text, text).std().item() == pytest.approx(1.0, rel=0.2)
        block = t5.encoder.blocks[0]
        assert isinstance(block, T5Block)
        x = torch.randn(2, 30, 128)
        k, v = block.attention.keys_and_values(x)
        q = block.attention.queries(x).unflatten(2, (4, 32)).transpose(1, 2)
        for y in (k, v, q @ k.mT):
            assert y.std().item() == pytest.approx(1.0, rel=0.15)
        table = t5.encoder.positions.table
        assert table.std().item() == pytest.approx(128**-0.5, rel=0.4)


@each(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"decoder_layers": 0}, "decoder_layers must be a whole number of at least 1, got 0"),
        ({"head_size": 0}, "head_size must be a whole number of at least 1, got 0"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"activation": "gelu"}, "activation must be one of 'relu', 'gated_gelu', got 'gelu'"),
        ({"buckets": 3}, "buckets must be at least 4 for a bidirectional bias, got 3"),
        ({"max_distance": 3}, "max_distance must be above 3, .* among 6 buckets, got 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"eps": 0.0}, "eps must be above 0, got 0.0"),
    ],
)
def test_invalid_configs_raise_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_unknown_attn_implementation_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"attn_implementation must be one of .* got 'flash'"):
        T5(TINY, attn_implementation="flash")  # type: ignore[arg-type]
