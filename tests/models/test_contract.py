"""What every model promises, whatever its kind; the files beside have what is special in each."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from tests.models.zoo import (
    ENCODER_DECODERS,
    ENTRIES,
    LENGTHS,
    VOCABULARY,
    Entry,
    entry_of,
    gradients,
    tokens,
)
from tests.support.tiers import each
from transformer_kernels import models
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models.generation import generate, sample
from transformer_kernels.nn import AttnImplementation, Stack, recompute_blocks
from transformer_kernels.nn.attention import AttentionLayer

CAUSAL = [entry for entry in ENTRIES if entry.causal is not None]
PADDED = [entry for entry in ENTRIES if entry.rows is not None]


def of_entries(entries: list[Entry]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=str)


def with_implementations(entries: list[Entry]) -> pytest.MarkDecorator:
    pairs = [(entry, one) for entry in entries for one in entry.implementations]
    ids = [f"{entry}-{one}" for entry, one in pairs]
    return pytest.mark.parametrize(("entry", "implementation"), pairs, ids=ids)


# Implementations


@pytest.mark.quick
@of_entries([*ENTRIES])
def test_implementations_agree_in_results_and_gradients(entry: Entry) -> None:
    """With the weights of one model, which all load."""
    state = entry.build().state_dict()
    for length in entry.lengths:
        results = []
        for implementation in entry.implementations:
            model = entry.kind(entry.config, *entry.more, attn_implementation=implementation)
            model = model.double()
            model.load_state_dict(state)
            torch.manual_seed(3)  # hashes
            y = entry.run(model, tokens(length))
            results.append((y, gradients(model, y)))
        for other in results[1:]:
            assert_same_function(other, results[0])
        assert results[0][0].isfinite().all()


@with_implementations([*ENTRIES])
def test_every_layer_has_the_selected_implementation(
    entry: Entry, implementation: AttnImplementation
) -> None:
    layers = [x for x in entry.build(implementation).modules() if isinstance(x, AttentionLayer)]
    assert {layer.attn_implementation for layer in layers} <= {implementation}
    assert len(layers) >= getattr(entry.config, "layers", 0)
    with pytest.raises(ValueError, match=r"attn_implementation must .*got 'flash'"):
        entry.build("flash")  # type: ignore[arg-type]


@with_implementations([entry for entry in ENTRIES if "reformer" not in entry.label])
def test_bfloat16_by_autocast_is_close_to_float32(
    entry: Entry, implementation: AttnImplementation
) -> None:
    """Also with a cache or a state in float32. Without the Reformer: rounding changes a hash."""
    model = entry.build(implementation).float().eval()
    expected = entry.run(model, tokens())
    with torch.autocast("cpu", torch.bfloat16):
        y = entry.run(model, tokens())
    assert_same_function(y, expected, dtype=torch.bfloat16)
    assert all(x.isfinite().all() for x in gradients(model, y))
    if entry.parts is not None and entry.causal is not None:
        with torch.autocast("cpu", torch.bfloat16):
            parts = entry.parts(model, tokens(), [4, 1, 4])
        assert_same_function(parts, entry.causal(model, tokens()), dtype=torch.bfloat16)


# Visibility


@with_implementations(CAUSAL)
def test_later_tokens_change_later_logits_only(
    entry: Entry, implementation: AttnImplementation
) -> None:
    assert entry.causal is not None
    model, text = entry.build(implementation), tokens(12)
    changed = text.clone()
    changed[:, 7:] = text[:, 7:] % (VOCABULARY - 1) + 1
    before, after = entry.causal(model, text), entry.causal(model, changed)
    assert_same_function(after[:, :7], before[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


@of_entries([entry for entry in ENTRIES if not entry.label.startswith(("lookup", "reformer"))])
def test_the_order_of_tokens_matters(entry: Entry) -> None:
    """The last results differ, or the only one of a text."""
    model, text = entry.build(), tokens()
    swapped = text[:, [0, 2, 1, *range(3, 9)]]
    before, after = entry.run(model, text), entry.run(model, swapped)
    assert not torch.isclose(before.flatten()[-1], after.flatten()[-1])


@with_implementations([entry for entry in CAUSAL if entry.parts is not None])
def test_a_text_read_in_parts_has_the_logits_of_the_whole(
    entry: Entry, implementation: AttnImplementation
) -> None:
    assert entry.parts is not None
    assert entry.causal is not None
    model = entry.build(implementation)
    for counts in ([12], [5, 1, 4, 2], [1] * 12):
        text = tokens(12)
        assert_same_function(entry.parts(model, text, counts), entry.causal(model, text))


@pytest.mark.quick
@with_implementations([entry for entry in CAUSAL if entry not in ENCODER_DECODERS])
def test_generated_tokens_are_those_of_the_whole_text(
    entry: Entry, implementation: AttnImplementation
) -> None:
    """A prompt longer than a segment, then tokens beyond the context, with dropout off."""
    model = entry.build(implementation, dropout=0.5)
    text, draws = tokens(7)[0].tolist(), torch.Generator()
    found = [
        list(generate(model, text, 20, temperature=0.7, generator=draws.manual_seed(2), cached=c))
        for c in (True, False)
    ]
    assert model.training
    model.eval()
    draws.manual_seed(2)
    for token in found[0]:
        window = text[-entry.config.context :] if hasattr(model, "new_cache") else text
        logits = entry.run(model, torch.tensor([window]))[0, -1]
        assert token == sample(logits.detach(), 0.7, draws)
        text.append(token)
    assert found[1] == found[0]
    assert len(set(found[0])) > 3


@with_implementations(ENCODER_DECODERS)
def test_greedy_targets_are_those_of_each_source_alone(
    entry: Entry, implementation: AttnImplementation
) -> None:
    model = with_varied_targets(entry.build(implementation, dropout=0.5))
    for end in (8, VOCABULARY - 1):
        found = [
            model.greedy_targets(
                tokens(), LENGTHS, vocabulary=VOCABULARY, begin=2, end=end, most=20, cached=cached
            )
            for cached in (True, False)
        ]
        assert model.training
        for b, n in enumerate(LENGTHS.tolist()):
            assert found[0][b] == by_hand(model.eval(), tokens()[b : b + 1, :n], end)
        assert found[1] == found[0]
        model.train()
    assert len({token for row in found[0] for token in row}) > 3


def with_varied_targets(model: Any) -> Any:
    """Weights by which few tokens repeat, and each source has a target of its own."""
    draws = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        std = 0.2 if "embedding" in name else 0.1 if "bias" in name else 1.0
        parameter.data.copy_(std * torch.randn(parameter.shape, generator=draws))
        if "norm.weight" in name:
            parameter.data.fill_(1.0)
    return model


def by_hand(model: Any, source: Tensor, end: int) -> list[int]:
    """Greedy target of one source, from `forward` on the whole text at each step."""
    text = [2]
    while len(text) <= 20:
        text.append(int(model(source, torch.tensor([text]))[0, -1].argmax()))
        if text[-1] == end:
            return text[1:-1]
    return text[1:]


# Padding


def padded(entry: Entry, model: Any, pad: int) -> list[Tensor]:
    text = tokens().where(torch.arange(9) < LENGTHS[:, None], pad)
    assert entry.rows is not None
    return entry.rows(model, text, LENGTHS, range(3))


@pytest.mark.quick
@with_implementations(PADDED)
def test_padding_changes_no_result_and_no_gradient(
    entry: Entry, implementation: AttnImplementation
) -> None:
    """Each row gives the same as alone, whatever its padding is."""
    assert entry.rows is not None
    model = entry.build(implementation)
    alone = [
        entry.rows(model, tokens()[b : b + 1, :n], None, [b])[0]
        for b, n in enumerate(LENGTHS.tolist())
    ]
    expected = (alone, gradients(model, *alone))
    for pad in (1, 5):
        rows = padded(entry, model, pad)
        assert_same_function((rows, gradients(model, *rows)), expected)
    whole = entry.rows(model, tokens(), None, range(3))
    assert not torch.isclose(whole[1].flatten()[-1], alone[1].flatten()[-1])


@with_implementations([entry for entry in PADDED if entry.poisoned is not None])
def test_nan_in_padding_reaches_no_result_and_no_gradient(
    entry: Entry, implementation: AttnImplementation
) -> None:
    assert entry.poisoned is not None
    model = entry.build(implementation)
    results = []
    for value in (0.0, math.nan):
        with torch.no_grad():
            model.get_parameter(entry.poisoned)[0] = value
        rows = padded(entry, model, 0)
        results.append((rows, gradients(model, *rows)))
    assert_same_function(results[1], results[0])


@with_implementations([entry for entry in PADDED if not entry.label.startswith("bert")])
def test_texts_of_length_0_have_finite_results(
    entry: Entry, implementation: AttnImplementation
) -> None:
    assert entry.rows is not None
    model = entry.build(implementation)
    rows = entry.rows(model, tokens(), torch.tensor([9, 0, 4]), range(3))
    assert all(x.isfinite().all() for x in (*rows, *gradients(model, *rows)))
    assert_same_function(entry.rows(model, tokens()[1:2, :0], None, [1])[0], rows[1])


@of_entries(PADDED)
def test_invalid_lengths_raise(entry: Entry) -> None:
    assert entry.rows is not None
    for lengths, error, message in (
        (LENGTHS[:2], ValueError, r"lengths must be \(batch,\) = \(3,\), got shape \(2,\)"),
        (LENGTHS + 1, ValueError, "lengths must be from 0 to 9, the padded length, got 10"),
        (LENGTHS.double(), TypeError, "lengths must be a tensor of int32 or int64"),
    ):
        with pytest.raises(error, match=message):
            entry.rows(entry.build(), tokens(), lengths, range(3))


# Training


def with_dropout(entry: Entry, model: Any) -> tuple[Tensor, ...]:
    """Results and gradients with the same dropout and hashes at every call."""
    torch.manual_seed(3)
    y = entry.run(model, tokens())
    return y, *gradients(model, y)


@of_entries([entry for entry in ENTRIES if entry.dropouts])
def test_recomputed_blocks_run_twice_and_have_the_same_bits(entry: Entry) -> None:
    model, runs = entry.build(dropout=0.3), []
    plain = with_dropout(entry, model)
    recompute_blocks(model)
    blocks = [block for x in model.modules() if isinstance(x, Stack) for block in x]
    for n, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda _, args, n=n: runs.append(n))
    recomputed = with_dropout(entry, model)
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)
    calls = 2 if entry.label.startswith("xl") else 1  # segments
    assert sorted(runs) == sorted([*range(len(blocks))] * 2 * calls)


def dropped(x: Tensor, y: Tensor) -> float:
    """Share of the elements of x that are 0 in y only."""
    return ((x != 0) & (y == 0)).sum().item() / (x != 0).sum().item()


@of_entries([entry for entry in ENTRIES if entry.dropouts])
def test_dropout_applies_to_the_embedding_and_to_every_branch_in_training_only(
    entry: Entry,
) -> None:
    model, shares = entry.build(dropout=0.5), []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, args, y: shares.append(dropped(args[0], y)))
    layers = [x for x in model.modules() if isinstance(x, AttentionLayer)]
    assert {layer.dropout for layer in layers} == {0.5 if entry.drops_weights else 0.0}
    y = entry.run(model, tokens(5))
    assert len(shares) == entry.dropouts
    assert shares == pytest.approx([0.5] * entry.dropouts, abs=0.25)
    assert not torch.allclose(entry.run(model, tokens(5)), y)
    shares.clear()
    evaluated = entry.run(model.eval(), tokens(5))
    assert shares == [0.0] * entry.dropouts
    assert_same_function(evaluated, entry.run(entry.build().eval(), tokens(5)))


GPT2_WEIGHTS = {r"(attention.out_proj|feed_forward.down_proj).weight": 0.02 / math.sqrt(8)}
UNIT_KEYS = {r"attention.(queries|keys).weight": 128**-0.5}


@each(
    ("name", "changes", "special"),
    [
        ("gpt2", {}, {**GPT2_WEIGHTS, r"positions.table": 0.01}),
        ("generator", {}, GPT2_WEIGHTS),
        ("sparse-fixed", {}, GPT2_WEIGHTS),
        ("reformer", {"columns": None}, GPT2_WEIGHTS),
        ("linear-learned", {}, GPT2_WEIGHTS | UNIT_KEYS),
        ("xl", {"head_size": 32}, {}),
        ("classifier", {}, {}),
        ("bert-pre-training", {}, {}),
        ("bert-classification", {}, {}),
    ],
)
def test_initial_weights(name: str, changes: dict[str, Any], special: dict[str, float]) -> None:
    """Normal with deviation 0.02 or another one, biases 0, and nearly uniform predictions."""
    entry, sizes = entry_of(name), {"layers": 4, "width": 128, "context": 512, **changes}
    for field in ("vocabulary", "hidden"):
        if getattr(entry.config, field, None) is not None:
            sizes[field] = 200
    model = entry.kind(replace(entry.config, **sizes), *entry.more)
    for own, parameter in model.named_parameters():
        if parameter.numel() < 1000:
            assert parameter.std() < 0.05 or own.endswith("norm.weight"), own
        elif own.endswith("bias") and parameter.dim() == 1:
            assert not parameter.any(), own
        else:
            expected = [std for key, std in special.items() if re.search(key, own)] or [0.02]
            assert parameter.std().item() == pytest.approx(expected[-1], rel=0.1), own
    p = entry.run(model.eval(), tokens(50)).exp()
    if name not in ("bert-pre-training", "bert-classification"):
        assert (p / p.mean(dim=-1, keepdim=True)).log().square().mean().sqrt() < 0.35


# Configs and sizes


def configs() -> Iterator[tuple[type[Any], Any]]:
    for name in models.__all__:
        if name.endswith("Config"):
            kind = getattr(models, name)
            yield kind, next((x.config for x in ENTRIES if type(x.config) is kind), None)


@each(("kind", "config"), configs(), ids=lambda x: str(x)[:60])
def test_invalid_fields_raise_an_error_that_names_them(kind: type[Any], config: Any) -> None:
    if config is None:
        config = models.FactTableConfig(rows=7, width=5, value_width=3)
    for name, hint in get_type_hints(kind).items():
        if name in ("head_size", "hidden", "clamp", "columns") or hint is int:
            wrong: Any = -1
            message = f"{name} must be a whole number of at least [01], got -1"
        elif get_origin(hint) is Literal:
            choices = ", ".join(map(repr, get_args(hint)))
            wrong, message = "none", f"{name} must be one of {choices}, got 'none'"
        elif name.endswith("dropout"):
            wrong, message = 1.0, f"{name} must be at least 0 and below 1, got 1.0"
        elif name == "eps":
            wrong, message = 0.0, "eps must be above 0, got 0.0"
        else:
            assert hint is bool or name == "scale"
            continue
        with pytest.raises(ValueError, match=message):
            replace(config, **{name: wrong})
    if hasattr(config, "layers") and kind is not models.T5Config:
        with pytest.raises(ValueError, match=r"width must be a multiple of heads .* and 7"):
            replace(config, heads=7, **({"head_size": None} if hasattr(config, "clamp") else {}))


@each(("kind", "config"), configs(), ids=lambda x: str(x)[:60])
def test_every_field_of_a_config_has_a_description(kind: type[Any], config: Any) -> None:
    """A string below the field, from which the help of the command line is made."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    described = {
        field.target.id
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }  # fmt: skip
    assert described == {field.name for field in fields(kind)}


@each(
    ("kind", "config", "count"),
    [
        (models.GPT2, models.GPT2_SIZES["gpt2"], 124_439_808),
        (models.GPT2, models.GPT2_SIZES["gpt2-medium"], 354_823_168),
        (models.GPT2, models.GPT2_SIZES["gpt2-large"], 774_030_080),
        (models.GPT2, models.GPT2_SIZES["gpt2-xl"], 1_557_611_200),
        (models.Bert, models.BERT_SIZES["bert-base"], 109_482_240),
        (models.BertForPreTraining, models.BERT_SIZES["bert-base"], 110_106_428),
        (models.Bert, models.BERT_SIZES["bert-large"], 335_141_888),
        (models.T5, models.T5_SIZES["t5-small"], 60_506_624),
        (models.T5, models.T5_SIZES["t5-base"], 222_903_552),
        (models.T5, models.T5_SIZES["t5-large"], 737_668_096),
        (models.T5, models.T5_SIZES["t5-3b"], 2_851_598_336),
        (models.T5, models.T5_SIZES["t5-11b"], 11_307_321_344),
        (models.T5, models.T5_SIZES["t5-v1.1-small"], 76_961_152),
        (models.T5, models.T5_SIZES["t5-v1.1-base"], 247_577_856),
        (models.T5, models.T5_SIZES["t5-v1.1-large"], 783_150_080),
        (models.T5, models.T5_SIZES["t5-v1.1-xl"], 2_849_757_184),
        (models.T5, models.T5_SIZES["t5-v1.1-xxl"], 11_135_332_352),
        (models.TransformerXL, models.TRANSFORMER_XL_SIZES["enwik8-base"], 41e6),
        (models.TransformerXL, models.TRANSFORMER_XL_SIZES["enwik8-large"], 277e6),
        (models.TransformerXL, models.TRANSFORMER_XL_SIZES["wt103-base"], 151e6),
        (models.SparseTransformer, models.SPARSE_TRANSFORMER_SIZES["enwik8"], 95e6),
        (models.Translator, models.TRANSLATOR_SIZES["base"], 63_054_848),
    ],
    ids=lambda x: str(x)[:80],
)
def test_named_sizes_have_the_published_parameter_counts(
    kind: Any, config: Any, count: float
) -> None:
    """Exactly, or to a million where the paper says so many."""
    with torch.device("meta"):
        model = kind(config)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == pytest.approx(count, abs=1e6 if isinstance(count, float) else 0)


@each(
    ("config", "expected"),
    [
        (
            models.SIZES["seed"],
            {"layers": 12, "width": 256, "heads": 8, "context": 256, "activation": "relu"},
        ),
        (models.SIZES["seed"], {"norm": "post", "form": "wide"}),
        (models.SIZES["nanogpt-cpu"], {"layers": 4, "width": 128, "heads": 4, "context": 64}),
        (models.CLASSIFIER_SIZES["seed"], {"layers": 6, "width": 128, "heads": 8, "context": 512}),
        (models.CLASSIFIER_SIZES["seed"], {"vocabulary": 50_000, "classes": 2}),
        (models.CLASSIFIER_SIZES["seed"], {"norm": "post", "form": "wide"}),
        (models.TRANSLATOR_SIZES["base"], {"layers": 6, "width": 512, "heads": 8, "hidden": 2048}),
        (models.TRANSLATOR_SIZES["base"], {"dropout": 0.1, "norm": "post", "shared": True}),
        (models.REFORMER_SIZES["enwik8"], {"layers": 12, "width": 1024, "heads": 8}),
        (models.REFORMER_SIZES["enwik8"], {"context": 65_536, "columns": 256, "hidden": None}),
        (models.REFORMER_SIZES["enwik8"], {"hash_every": 1, "dropout": 0.1}),
        (
            models.SPARSE_TRANSFORMER_SIZES["enwik8"].sparse_pattern(),
            {"kind": "fixed", "combination": "merged", "stride": 128, "summaries": 32},
        ),
    ],
    ids=lambda x: str(x)[:80],
)
def test_named_sizes_are_those_of_their_sources(config: Any, expected: dict[str, Any]) -> None:
    assert {name: getattr(config, name) for name in expected} == expected


@each(
    ("name", "expected"),
    [
        ("gpt2", ["embedding.weight"]),
        ("bert-pre-training", ["token_bias", "encoder.embedding.weight"]),
        ("xl", ["embedding.weight", "logits_bias"]),
        ("translator", ["embedding.weight"]),
        ("translator-pre-apart", ["embedding", "source_embedding", "projection"]),
        ("t5", ["embedding.weight"]),
        ("t5-v1.1", ["embedding", "projection"]),
    ],
)
def test_embeddings_and_projections_share_one_parameter(name: str, expected: list[str]) -> None:
    """Also in copies in another dtype."""
    expected = [x if "." in x or "bias" in x else f"{x}.weight" for x in expected]
    model = entry_of(name).build()
    for one in (model, model.float()):
        shapes = {key: x.shape for key, x in one.state_dict().items()}
        assert sorted(key for key in shapes if VOCABULARY in shapes[key]) == sorted(expected)


@of_entries([entry_of(x) for x in ("gpt2", "generator", "bert", "classifier", "translator")])
def test_texts_longer_than_the_context_raise_value_error(entry: Entry) -> None:
    context = entry.config.context
    message = rf"at most {context} positions long \(the context\), got {context + 1}"
    with pytest.raises(ValueError, match=message):
        entry.run(entry.build(), tokens(context + 1))
