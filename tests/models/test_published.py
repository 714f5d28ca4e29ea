"""Loading published weights: variations between files, and errors for invalid files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models import huggingface
from transformer_kernels.models import (
    GPT2,
    Bert,
    BertConfig,
    BertForClassification,
    BertForPreTraining,
    GPT2Config,
)

pytestmark = pytest.mark.exhaustive  # the files are written by transformers

Tensors = dict[str, Tensor]


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
    return {
        name.removeprefix("transformer.").removeprefix("bert."): t for name, t in tensors.items()
    }


def without(tensors: Tensors, beginning: str) -> Tensors:
    return {name: t for name, t in tensors.items() if not name.startswith(beginning)}


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=0)


# Variations between files


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


def test_bert_loads_other_names_and_ignores_buffers(bert_tensors: Tensors, tmp_path: Path) -> None:
    expected = BertForPreTraining.from_safetensors(huggingface.write(bert_tensors, tmp_path))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in bert_tensors.items()
    }
    assert sum("gamma" in name for name in old) == 6
    copies = {
        "cls.predictions.decoder.weight": bert_tensors[
            "bert.embeddings.word_embeddings.weight"
        ].clone(),
        "cls.predictions.decoder.bias": bert_tensors["cls.predictions.bias"].clone(),
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


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_converted_to_the_default_dtype(
    stored: torch.dtype, wanted: torch.dtype, gpt2_tensors: Tensors, tmp_path: Path
) -> None:
    halves = {name: tensor.to(stored) for name, tensor in gpt2_tensors.items()}
    with huggingface.default_dtype(wanted):
        model = GPT2.from_safetensors(huggingface.write(halves, tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    expected = halves["transformer.h.1.mlp.c_fc.weight"].T.to(wanted)
    assert torch.equal(model.get_parameter("blocks.1.feed_forward.up_proj.weight"), expected)
    assert model(torch.arange(20)[None]).isfinite().all()


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


# Invalid files

Change = Callable[[Tensors], Tensors]


def replaced(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors | {name: tensor}


def removed(name: str) -> Change:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def assert_rejected(load: Callable[[Path], object], file: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load(file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed("transformer.wte.weight"), "lacks wte.weight, which the model needs"),
        (removed("transformer.h.1.mlp.c_fc.bias"), "lacks h.1.mlp.c_fc.bias, which"),
        (
            replaced("transformer.h.9.ln_1.bias", torch.ones(128)),
            "lacks h.2, which the model needs",
        ),
        (lambda tensors: without(tensors, "transformer.h."), "lacks h.0, which"),
        (lambda tensors: {}, "lacks wte.weight"),
        (
            replaced("transformer.h.0.attn.c_attn.weight", torch.ones(384, 128)),
            r"transformer.h.0.attn.c_attn.weight of .* shape \(128, 384\), got \(384, 128\)",
        ),
        (
            replaced("transformer.wpe.weight", torch.ones(20, 64)),
            r"transformer.wpe.weight of .* must have shape \(20, 128\), got \(20, 64\)",
        ),
        (
            replaced("transformer.wte.weight", torch.ones(128)),
            r"transformer.wte.weight of .* must be a non-empty matrix, got shape \(128,\)",
        ),
        (
            replaced("transformer.wpe.weight", torch.ones(0, 128)),
            r"wpe.weight of .* must be a non-empty matrix, got shape \(0, 128\)",
        ),
        (
            replaced("transformer.ln_f.bias", torch.ones(128, dtype=torch.int8)),
            "transformer.ln_f.bias of .* must be floating-point, got torch.int8",
        ),
        (
            replaced("score.weight", torch.ones(2, 128)),
            "has unexpected tensors: score.weight$",
        ),
        (
            lambda tensors: tensors | {f"x{n}": torch.ones(1) for n in range(5)},
            "unexpected tensors: x0, x1, x2 and 2 more$",
        ),
        (
            replaced("ln_f.bias", torch.ones(128)),
            "has ln_f.bias twice, as (transformer.ln_f.bias and ln_f.bias|ln_f.bias and transf.*)$",
        ),
        (
            replaced("lm_head.weight", torch.ones(61, 128)),
            "lm_head.weight of .* must equal the tensor that it is tied to",
        ),
    ],
)
def test_invalid_gpt2_file_raises_value_error(
    change: Change, message: str, gpt2_tensors: Tensors, tmp_path: Path
) -> None:
    file = huggingface.write(change(gpt2_tensors), tmp_path)
    assert_rejected(GPT2.from_safetensors, file, message)


NORM = "bert.encoder.layer.1.output.LayerNorm"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed("bert.pooler.dense.bias"), "lacks pooler.dense.bias, which the model needs"),
        (removed(f"{NORM}.bias"), "lacks encoder.layer.1.output.LayerNorm.bias, which"),
        (
            replaced(f"{NORM}.gamma", torch.ones(128)),
            "has encoder.layer.1.output.LayerNorm.weight twice, as",
        ),
        (
            replaced("bert.encoder.layer.1.intermediate.dense.weight", torch.ones(128, 72)),
            r"layer.1.intermediate.dense.weight of .* shape \(72, 128\), got \(128, 72\)",
        ),
        (
            replaced("bert.embeddings.LayerNorm.weight", torch.ones(1, 128)),
            r"bert.embeddings.LayerNorm.weight of .* shape \(128,\), got \(1, 128\)",
        ),
        (
            replaced("qa_outputs.weight", torch.ones(2, 128)),
            "has unexpected tensors: qa_outputs.weight$",
        ),
    ],
)
def test_invalid_bert_file_raises_value_error(
    change: Change, message: str, bert_tensors: Tensors, tmp_path: Path
) -> None:
    file = huggingface.write(change(bert_tensors), tmp_path)
    assert_rejected(Bert.from_safetensors, file, message)
    assert_rejected(BertForPreTraining.from_safetensors, file, message)
    assert_rejected(
        lambda name: BertForClassification.from_safetensors(name, classes=2), file, message
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed("cls.predictions.bias"), "lacks cls.predictions.bias, which the model needs"),
        (
            replaced("cls.seq_relationship.weight", torch.ones(3, 128)),
            r"cls.seq_relationship.weight of .* shape \(2, 128\), got \(3, 128\)",
        ),
        (
            replaced("cls.predictions.decoder.weight", torch.ones(61, 128)),
            "cls.predictions.decoder.weight of .* must equal the tensor that it is tied to",
        ),
        (
            replaced("cls.predictions.decoder.bias", torch.ones(61)),
            "cls.predictions.decoder.bias of .* must equal the tensor that it is tied to",
        ),
        (
            replaced("cls.more", torch.ones(1)),
            "has unexpected tensors: cls.more",
        ),
    ],
)
def test_invalid_pre_training_heads_raise_value_error(
    change: Change, message: str, bert_tensors: Tensors, tmp_path: Path
) -> None:
    file = huggingface.write(change(bert_tensors), tmp_path)
    assert_rejected(BertForPreTraining.from_safetensors, file, message)
    Bert.from_safetensors(file)


LOADERS = pytest.mark.parametrize(
    "load",
    [
        GPT2.from_safetensors,
        Bert.from_safetensors,
        BertForPreTraining.from_safetensors,
        BertForClassification.from_safetensors,
    ],
    ids=["gpt2", "bert", "pre-training", "classification"],
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
        lambda whole: whole.replace(b'"F32"', b'"F99"'),
        lambda whole: whole.replace(b"[", b"{"),
    ],
    ids=["empty", "short", "text", "header cut", "cut", "longer", "dtype", "header"],
)
def test_damaged_file_raises_value_error(
    load: Callable[[Path], object],
    damage: Callable[[bytes], bytes],
    gpt2_tensors: Tensors,
    tmp_path: Path,
) -> None:
    file = huggingface.write(gpt2_tensors, tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert_rejected(load, file, "is not a safetensors file, or it is damaged: ")


@LOADERS
def test_missing_file_and_folder_raise_os_errors(
    load: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        load(tmp_path)


def test_huge_layer_number_is_rejected_quickly(gpt2_tensors: Tensors, tmp_path: Path) -> None:
    tensors = gpt2_tensors | {"transformer.h.999999999.ln_1.bias": torch.ones(128)}
    assert_rejected(GPT2.from_safetensors, huggingface.write(tensors, tmp_path), "lacks h.2, which")


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
