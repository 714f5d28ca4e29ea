"""Loading published weights: variations between files, and errors for invalid files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models import huggingface
from tests.models.huggingface import Tensors, t5_tensors
from tests.support.runtime import default_dtype
from transformer_kernels.models import (
    GPT2,
    T5,
    Bert,
    BertConfig,
    BertForClassification,
    BertForPreTraining,
    GPT2Config,
    T5Config,
)

T5_CONFIG = T5Config(
    layers=2, decoder_layers=1, heads=3, width=10, head_size=5, hidden=14, vocabulary=31, buckets=6
)
V1_1 = replace(T5_CONFIG, activation="gated_gelu", tied_embeddings=False)
T5_TENSORS, V1_1_TENSORS = t5_tensors(T5_CONFIG), t5_tensors(V1_1)
TABLE = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
CROSS = "decoder.block.0.layer.1.EncDecAttention"
NORM = "bert.encoder.layer.1.output.LayerNorm"

by_transformers = pytest.mark.exhaustive
"""For tests whose files are written by transformers"""


@pytest.fixture(scope="module")
def gpt2_tensors(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    model = huggingface.gpt2(torch.float32)
    return huggingface.read(huggingface.saved(model, tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def bert_tensors(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    model = huggingface.bert("BertForPreTraining", torch.float32)
    return huggingface.read(huggingface.saved(model, tmp_path_factory.mktemp("bert")))


def without_prefix(tensors: Tensors) -> Tensors:
    """Names as in a file of the encoder or decoder alone, which have no prefix."""
    return {re.sub(r"^(transformer|bert)\.", "", name): t for name, t in tensors.items()}


def without(tensors: Tensors, beginning: str) -> Tensors:
    return {name: t for name, t in tensors.items() if not name.startswith(beginning)}


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=0)


# Variations between files


@by_transformers
def test_config_follows_from_the_shapes(
    gpt2_tensors: Tensors, bert_tensors: Tensors, tmp_path: Path
) -> None:
    gpt2 = GPT2.from_safetensors(huggingface.write(gpt2_tensors, tmp_path))
    assert gpt2.config == GPT2Config(layers=2, heads=2, width=128, vocabulary=61, context=20)
    file = huggingface.write(bert_tensors, tmp_path)
    sizes = {"layers": 2, "heads": 2, "width": 128, "hidden": 72, "vocabulary": 61, "context": 20}
    assert Bert.from_safetensors(file).config == BertConfig(**sizes)
    other = BertForPreTraining.from_safetensors(file, heads=4, dropout=0.25).config
    assert other == BertConfig(**sizes | {"heads": 4}, dropout=0.25)


@by_transformers
def test_gpt2_loads_other_names_and_ignores_buffers(gpt2_tensors: Tensors, tmp_path: Path) -> None:
    expected = GPT2.from_safetensors(huggingface.write(gpt2_tensors, tmp_path))
    embedding = gpt2_tensors["transformer.wte.weight"].clone()
    buffers = {
        "h.0.attn.bias": torch.ones(1, 1, 20, 20).tril(),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    with_prefix = {f"transformer.{name}": buffer for name, buffer in buffers.items()}
    for tensors in (
        without_prefix(gpt2_tensors),
        gpt2_tensors | {"lm_head.weight": embedding},
        without_prefix(gpt2_tensors) | buffers,
        gpt2_tensors | with_prefix,
    ):
        assert_same_weights(GPT2.from_safetensors(huggingface.write(tensors, tmp_path)), expected)


@by_transformers
def test_bert_loads_other_names_and_ignores_buffers(bert_tensors: Tensors, tmp_path: Path) -> None:
    expected = BertForPreTraining.from_safetensors(huggingface.write(bert_tensors, tmp_path))
    old = {
        re.sub("Norm.weight$", "Norm.gamma", re.sub("Norm.bias$", "Norm.beta", name)): tensor
        for name, tensor in bert_tensors.items()
    }
    assert sum("gamma" in name for name in old) == 6
    copies = {
        f"cls.predictions.decoder.{name}": bert_tensors[source].clone()
        for name, source in (
            ("weight", "bert.embeddings.word_embeddings.weight"),
            ("bias", "cls.predictions.bias"),
        )
    }
    position_ids = {"bert.embeddings.position_ids": torch.arange(20)[None]}
    for tensors in (
        without_prefix(bert_tensors),
        old,
        bert_tensors | copies,
        bert_tensors | position_ids,
        without_prefix(bert_tensors | position_ids),
    ):
        file = huggingface.write(tensors, tmp_path)
        assert_same_weights(BertForPreTraining.from_safetensors(file), expected)
        assert_same_weights(Bert.from_safetensors(file), expected.encoder)


@by_transformers
def test_heads_are_required_only_by_models_that_have_them(
    bert_tensors: Tensors, tmp_path: Path
) -> None:
    encoder = Bert.from_safetensors(huggingface.write(bert_tensors, tmp_path))
    file = huggingface.write(without(bert_tensors, "cls."), tmp_path)
    assert_same_weights(Bert.from_safetensors(file), encoder)
    with pytest.raises(ValueError, match=r"safetensors lacks cls.predictions.bias, which"):
        BertForPreTraining.from_safetensors(file)
    with pytest.raises(ValueError, match=r"safetensors lacks classifier.weight, which the model"):
        BertForClassification.from_safetensors(file)


@by_transformers
def test_new_classes_are_initialised_for_any_file(bert_tensors: Tensors, tmp_path: Path) -> None:
    encoder = Bert.from_safetensors(huggingface.write(bert_tensors, tmp_path))
    classifier = {"classifier.weight": torch.ones(3, 128), "classifier.bias": torch.ones(3)}
    for tensors in (bert_tensors, without(bert_tensors, "cls.") | classifier):
        file = huggingface.write(tensors, tmp_path)
        model = BertForClassification.from_safetensors(file, classes=70)
        assert_same_weights(model.encoder, encoder)
        assert model.classifier.weight.shape == (70, 128)
        assert model.classifier.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not model.classifier.bias.any()
        assert all(p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    assert_same_weights(Bert.from_safetensors(file), encoder)
    own = BertForClassification.from_safetensors(file)
    assert torch.equal(own.classifier.weight, classifier["classifier.weight"])
    with pytest.raises(ValueError, match="classes must be a whole number of at least 1, got 0"):
        BertForClassification.from_safetensors(file, classes=0)


@by_transformers
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_converted_to_the_default_dtype(
    stored: torch.dtype, wanted: torch.dtype, gpt2_tensors: Tensors, tmp_path: Path
) -> None:
    halves = {name: tensor.to(stored) for name, tensor in gpt2_tensors.items()}
    with default_dtype(wanted):
        model = GPT2.from_safetensors(huggingface.write(halves, tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    expected = halves["transformer.h.1.mlp.c_fc.weight"].T.to(wanted)
    assert torch.equal(model.get_parameter("blocks.1.feed_forward.up_proj.weight"), expected)
    assert model(torch.arange(20)[None]).isfinite().all()


@by_transformers
def test_loaded_model_is_in_evaluation_mode_and_owns_its_weights(
    gpt2_tensors: Tensors, tmp_path: Path
) -> None:
    """The file may change afterwards, and no two parameters share storage."""
    file = huggingface.write(gpt2_tensors, tmp_path)
    model = GPT2.from_safetensors(file, dropout=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert not model.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.is_contiguous(), name
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel(), name


def test_config_of_t5_follows_from_names_and_shapes(tmp_path: Path) -> None:
    file = huggingface.write(T5_TENSORS, tmp_path)
    assert T5.from_safetensors(file).config == T5_CONFIG
    other = T5.from_safetensors(file, max_distance=50, dropout=0.25)
    assert other.config == replace(T5_CONFIG, max_distance=50, dropout=0.25)
    assert not other.training
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    assert T5.from_safetensors(huggingface.write(V1_1_TENSORS, tmp_path)).config == V1_1


def test_copies_of_the_embedding_and_the_unused_table_are_accepted(tmp_path: Path) -> None:
    expected = huggingface.write(T5_TENSORS, tmp_path / "expected")
    embedding = T5_TENSORS["shared.weight"]
    copies = {
        f"{name}.weight": embedding.clone()
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    }
    unused = {f"{CROSS}.relative_attention_bias.weight": torch.ones(6, 3)}
    for more in (copies, unused, copies | unused):
        file = huggingface.write(T5_TENSORS | more, tmp_path / "actual")
        assert T5.from_safetensors(file).config == T5_CONFIG
        assert_same_weights(T5.from_safetensors(file), T5.from_safetensors(expected))


# Invalid files

Change = Callable[[Tensors], Tensors]
Load = Callable[[Path], object]


def ones(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    """Replaces a tensor, or adds it."""
    return lambda tensors: tensors | {name: torch.ones(shape, dtype=dtype)}


def removed(name: str) -> Change:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


TIED = "must equal the tensor that it is tied to"


def assert_rejected(load: Load, file: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load(file)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_file_of_t5_v1_1_needs_both_up_projections(tmp_path: Path) -> None:
    name = "decoder.block.0.layer.2.DenseReluDense.wi_1.weight"
    file = huggingface.write(removed(name)(V1_1_TENSORS), tmp_path)
    assert_rejected(T5.from_safetensors, file, f"lacks {name}, which the model needs")


QUERIES = "encoder.block.{}.layer.0.SelfAttention.q"
SECOND_TABLE = TABLE.replace("block.0", "block.1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed("shared.weight"), "lacks shared.weight, which the model needs"),
        (removed(TABLE), f"lacks {TABLE}, which the model needs"),
        (removed(TABLE.replace("enc", "dec")), f"lacks {TABLE.replace('enc', 'dec')}, which"),
        (removed(f"{CROSS}.k.weight"), f"lacks {CROSS}.k.weight, which"),
        (lambda tensors: {}, "lacks shared.weight"),
        (
            ones(f"{QUERIES.format(1)}.weight", 15, 11),
            r"q.weight of .* must have shape \(15, 10\), got \(15, 11\)",
        ),
        (
            ones(f"{QUERIES.format(0)}.weight", 16, 10),
            r"q.weight of .* must have shape \(15, 10\), got \(16, 10\)",
        ),
        (ones(TABLE, 6), r"bias.weight of .* must be a non-empty matrix, got shape \(6,\)"),
        (ones("lm_head.weight", 31, 9), r"lm_head.weight of .* shape \(31, 10\), got \(31, 9\)"),
        (ones("decoder.embed_tokens.weight", 31, 10), "decoder.embed_tokens.weight of .*" + TIED),
        (ones(SECOND_TABLE, 6, 3), f"has unexpected tensors: {SECOND_TABLE}"),
        (ones(f"{QUERIES.format(1)}.bias", 15), f"unexpected tensors: {QUERIES.format(1)}.bias$"),
        (
            ones("encoder.block.1.layer.1.DenseReluDense.wi_1.weight", 14, 10),
            "has unexpected tensors: encoder.block.1.layer.1.DenseReluDense.wi_1.weight$",
        ),
    ],
)
def test_invalid_files_of_t5_raise_value_error(
    change: Change, message: str, tmp_path: Path
) -> None:
    assert_rejected(T5.from_safetensors, huggingface.write(change(T5_TENSORS), tmp_path), message)


H0, HEADS = "transformer.h.0", "cls.predictions.decoder"


@by_transformers
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed("transformer.wte.weight"), "lacks wte.weight, which the model needs"),
        (removed("transformer.h.1.mlp.c_fc.bias"), "lacks h.1.mlp.c_fc.bias, which"),
        (ones("transformer.h.999999999.ln_1.bias", 128), "lacks h.2, which the model needs"),
        (lambda tensors: without(tensors, "transformer.h."), "lacks h.0, which"),
        (
            ones(f"{H0}.attn.c_attn.weight", 384, 128),
            rf"{H0}.attn.c_attn.weight of .* shape \(128, 384\), got \(384, 128\)",
        ),
        (
            ones("transformer.wpe.weight", 20, 64),
            r"transformer.wpe.weight of .* must have shape \(20, 128\), got \(20, 64\)",
        ),
        (
            ones("transformer.wpe.weight", 0, 128),
            r"wpe.weight of .* must be a non-empty matrix, got shape \(0, 128\)",
        ),
        (
            ones("transformer.ln_f.bias", 128, dtype=torch.int8),
            "transformer.ln_f.bias of .* must be floating-point, got torch.int8",
        ),
        (
            lambda tensors: tensors | {f"x{n}": torch.ones(1) for n in range(5)},
            "unexpected tensors: x0, x1, x2 and 2 more$",
        ),
        (
            ones("ln_f.bias", 128),
            "has ln_f.bias twice, as (transformer.ln_f.bias and ln_f.bias|ln_f.bias and transf.*)$",
        ),
        (ones("lm_head.weight", 61, 128), "lm_head.weight of .*" + TIED),
    ],
)
def test_invalid_files_of_gpt2_raise_value_error(
    change: Change, message: str, gpt2_tensors: Tensors, tmp_path: Path
) -> None:
    """A layer that is missing is found quickly, however large the number of another one is."""
    file = huggingface.write(change(gpt2_tensors), tmp_path)
    assert_rejected(GPT2.from_safetensors, file, message)


@by_transformers
@pytest.mark.parametrize(
    ("change", "message", "of_the_heads"),
    [
        (removed("bert.pooler.dense.bias"), "lacks pooler.dense.bias, which the model", False),
        (removed(f"{NORM}.bias"), "lacks encoder.layer.1.output.LayerNorm.bias, which", False),
        (ones(f"{NORM}.gamma", 128), "has encoder.layer.1.output.LayerNorm.weight twice", False),
        (
            ones("bert.encoder.layer.1.intermediate.dense.weight", 128, 72),
            r"layer.1.intermediate.dense.weight of .* shape \(72, 128\), got \(128, 72\)",
            False,
        ),
        (
            ones("bert.embeddings.LayerNorm.weight", 1, 128),
            r"bert.embeddings.LayerNorm.weight of .* shape \(128,\), got \(1, 128\)",
            False,
        ),
        (ones("qa_outputs.weight", 2, 128), "has unexpected tensors: qa_outputs.weight$", False),
        (removed("cls.predictions.bias"), "lacks cls.predictions.bias, which the model", True),
        (
            ones("cls.seq_relationship.weight", 3, 128),
            r"cls.seq_relationship.weight of .* shape \(2, 128\), got \(3, 128\)",
            True,
        ),
        (ones(f"{HEADS}.weight", 61, 128), f"{HEADS}.weight of .*{TIED}", True),
        (ones(f"{HEADS}.bias", 61), f"{HEADS}.bias of .*{TIED}", True),
        (ones("cls.more", 1), "has unexpected tensors: cls.more", True),
    ],
)
def test_invalid_files_of_bert_raise_value_error(
    change: Change, message: str, of_the_heads: bool, bert_tensors: Tensors, tmp_path: Path
) -> None:
    """What is wrong with the heads of pre-training does not matter to the encoder."""
    file = huggingface.write(change(bert_tensors), tmp_path)
    assert_rejected(BertForPreTraining.from_safetensors, file, message)
    if of_the_heads:
        Bert.from_safetensors(file)
    else:
        assert_rejected(Bert.from_safetensors, file, message)
        assert_rejected(partial(BertForClassification.from_safetensors, classes=2), file, message)


LOADERS = pytest.mark.parametrize(
    "load",
    [
        GPT2.from_safetensors,
        Bert.from_safetensors,
        BertForPreTraining.from_safetensors,
        BertForClassification.from_safetensors,
        T5.from_safetensors,
    ],
    ids=["gpt2", "bert", "pre-training", "classification", "t5"],
)


@LOADERS
@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: b"text",
        lambda whole: b"text, and more of it " * 50,
        lambda whole: whole[:40],
        lambda whole: whole[:-4],
        lambda whole: whole + b"more",
        lambda whole: whole.replace(b'"F64"', b'"F99"'),
        lambda whole: whole.replace(b"[", b"{"),
    ],
    ids=["empty", "short", "text", "header cut", "cut", "longer", "dtype", "header"],
)
def test_damaged_file_raises_value_error(
    load: Load, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    file = huggingface.write(T5_TENSORS, tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert_rejected(load, file, "is not a safetensors file, or it is damaged: ")


@LOADERS
def test_missing_file_and_folder_raise_os_errors(load: Load, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        load(tmp_path)


@by_transformers
def test_heads_must_be_given_if_the_width_is_not_a_multiple_of_64(tmp_path: Path) -> None:
    for theirs, load in (
        (huggingface.gpt2(n_embd=96, n_head=3), GPT2.from_safetensors),
        (huggingface.bert("BertModel", hidden_size=96), Bert.from_safetensors),
    ):
        file = huggingface.saved(theirs, tmp_path)
        assert_rejected(
            load, file, "heads must be given for .*: its width 96 is not a multiple of 64"
        )
        assert load(file, heads=3).config.heads == 3
        with pytest.raises(ValueError, match="width must be a multiple of heads"):
            load(file, heads=5)


@LOADERS
def test_unknown_attn_implementation_raises_before_the_file_is_read(
    load: Callable[..., object],
) -> None:
    with pytest.raises(
        ValueError, match="attn_implementation must be one of 'eager', 'fused', 'sdpa'"
    ):
        load("no file", attn_implementation="fast")


def test_missing_safetensors_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"safetensors is not installed: pip install .*\[train\]"):
        GPT2.from_safetensors("any")
