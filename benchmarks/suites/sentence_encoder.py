"""A sentence encoder with kernels of `make hub`: padded texts, and texts without padding.

    make test-hub
    pip install --no-deps --target build/peers --requirement requirements/peers.txt
    PYTHONPATH=build/hub_packages:build/peers python -m benchmarks sentence_encoder --seconds 60

The model is a BERT with the widths of bert-base and random weights, in sentence-transformers. The
texts of a batch have lengths spread evenly from 3 tokens to 512. For "tk/flash-attn"
sentence-transformers joins them, in all layers; for all others they are padded. `encode` includes
the tokenizer. `error` is the root mean square of the difference from "sdpa" in float32, relative.

PEERS run the model in other libraries, for inference alone, with torch's number of threads. Those
that cannot run, or whose packages are not installed, are left out with the reason.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner.checks import Sizes
from benchmarks.runner.run import Comparison, Measurement, NotMeasuredError, Run
from building.hub import local_kernels
from transformer_kernels.bench import Direction
from transformer_kernels.bench.contenders import Contender

IMPLEMENTATIONS = ("sdpa", "tk/attention", "tk/flash-attn")
"""`attn_implementation`, and the variant in rows."""
BASE = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = 995
ROUNDING = 1e-4
"""Relative error that every implementation may have."""
INT8_ERROR = 0.05
"""Relative error that implementations in int8 may have: a product whose factors are rounded to 127
steps of their largest values has one of about 1%, and layers add theirs."""
INPUTS = ("input_ids", "attention_mask")


def comparisons() -> Iterator[Comparison]:
    for dtype in (torch.float32, torch.bfloat16):
        case = Sizes(name="encoder", B=8, H_q=12, H_kv=12, M=512, N=512, dtype=dtype)
        yield Comparison(name=case.dtype_name, measurements=partial(encoders, case, BASE))


def encoders(case: Sizes, sizes: dict[str, int], run: Run) -> Iterator[Measurement]:
    """Measures `encode`, and a training step: a forward and a backward pass.

    Raises:
        AssertionError: the error of an implementation is more than 1.5 times that of "sdpa", or
            with int8 more than INT8_ERROR.
    """
    import sentence_transformers  # noqa: F401  # a suite without it says so first

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["LOCAL_KERNELS"] = local_kernels()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_encoder(folder, **sizes)
        exact = encoder(folder, "sdpa")
        every = {name: encoder(folder, name, case.dtype) for name in IMPLEMENTATIONS}
        batch = texts(case.B, case.N)
        inference = every | peers(folder, case, batch, run)
    kinds: list[tuple[Direction, Callable[[Any, list[str]], Callable[[], Tensor]], dict[str, Any]]]
    kinds = [("fwd", encode, inference), ("fwd+bwd", step, every)]
    for direction, prepare, compared in kinds:
        expected = prepare(exact, batch)()
        errors: dict[str, float] = {}
        contenders = []
        for variant, one in compared.items():
            got = prepare(one, batch)()
            errors[variant] = float((got.float() - expected).norm() / expected.norm())
            limit = INT8_ERROR if "int8" in variant else max(1.5 * errors["sdpa"], ROUNDING)
            assert errors[variant] <= limit, (
                f"{direction}, {case.dtype_name}: {variant} is {errors[variant]:.1e} off"
            )
            work = partial(prepare, one, batch)
            contenders.append(Contender(case, direction, variant, work, errors[variant]))
        yield run.timed(contenders)


def write_encoder(folder: Path, **sizes: Any) -> None:
    """Writes a BERT with random weights and its tokenizer, whose words are w0, w1, ..."""
    import transformers

    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    names = [*SPECIAL, *(f"w{n}" for n in range(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(names), encoding="utf-8")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(names), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
    )
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


def texts(batch: int, longest: int) -> list[str]:
    """Texts of 3 to `longest` tokens; [CLS] and [SEP] are two of them."""
    lengths = torch.linspace(3, longest, batch).round().int().tolist()
    return [" ".join(f"w{(7 * n + m) % WORDS}" for m in range(n - 2)) for n in lengths]


def encoder(folder: Path, attn_implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """Loads the encoder. Its embeddings are means over tokens."""
    from sentence_transformers import SentenceTransformer

    options = {"attn_implementation": attn_implementation, "dtype": dtype}
    return SentenceTransformer(str(folder), device="cpu", model_kwargs=options)


def encode(one: Any, batch: list[str]) -> Callable[[], Tensor]:
    """Returns a call that computes the embeddings of the texts."""

    def run() -> Tensor:
        found: Tensor = one.encode(batch, batch_size=len(batch), convert_to_tensor=True)
        return found

    return run


def step(one: Any, batch: list[str]) -> Callable[[], Tensor]:
    """Returns a call that runs a training step; the result is the gradient of the vocabulary."""
    features, vocabulary = one.preprocess(batch), next(one.parameters())

    def run() -> Tensor:
        one.zero_grad()
        one(dict(features))["sentence_embedding"].square().mean().backward()
        gradient: Tensor = vocabulary.grad
        return gradient

    return run


def peers(folder: Path, case: Sizes, batch: list[str], run: Run) -> dict[str, Any]:
    """Returns the encoder of each peer that runs here."""
    found = {}
    for name, build in PEERS.items():
        try:
            found[name] = build(folder, case.dtype, batch)
        except (ImportError, NotMeasuredError) as reason:
            run.skipped.append(f"{case.name}, {case.dtype_name}: {name}: {reason}")
    return found


def compiled(
    folder: Path,
    dtype: torch.dtype,
    batch: list[str],
    *,
    backend: str = "inductor",
    int8: bool = False,
) -> Any:
    """`torch.compile`. With int8, torchao quantizes the inputs of linear layers in each call."""
    if backend != "inductor":
        import_module(backend)
    one = encoder(folder, "sdpa", dtype)
    bert = one[0].model
    if int8:
        quantization = import_module("torchao.quantization")
        quantization.quantize_(bert, quantization.Int8DynamicActivationInt8WeightConfig())
    bert.forward = torch.compile(bert.forward, backend=backend)
    return one


def onnx_runtime(folder: Path, dtype: torch.dtype, batch: list[str], *, int8: bool = False) -> Any:
    """ONNX Runtime, with all of its optimizations, as by default. With int8, inputs of linear
    layers are quantized in each call.

    `onnxruntime.transformers.optimizer` makes attention one node, which was no faster; neither were
    graphs of "sdpa" and of the other exporter.

    Raises:
        NotMeasuredError: the dtype is not float32.
    """
    if dtype != torch.float32:
        raise NotMeasuredError("is measured in float32 only")
    runtime = import_module("onnxruntime")
    one = encoder(folder, "eager")
    path = str(folder / "bert.onnx")
    features = inputs(one, batch)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of dynamo=False
        torch.onnx.export(
            LastLayer(one[0].model), tuple(features.values()), path, dynamo=False,
            input_names=list(INPUTS), dynamic_axes={name: {0: "B", 1: "M"} for name in INPUTS},
        )  # fmt: skip
    if int8:
        quantization = import_module("onnxruntime.quantization")
        quantization.quantize_dynamic(path, path, per_channel=True)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(path, options)
    return with_forward(one, lambda arrays: session.run(None, arrays)[0])


def openvino(folder: Path, dtype: torch.dtype, batch: list[str], *, int8: bool = False) -> Any:
    """OpenVINO. With int8, scales of the inputs of linear layers are those of the texts."""
    runtime = import_module("openvino")
    one = encoder(folder, "sdpa")
    features = inputs(one, batch)
    model = runtime.convert_model(LastLayer(one[0].model), example_input=features)
    if int8:
        nncf = import_module("nncf")
        data = nncf.Dataset([{name: x.numpy() for name, x in features.items()}])
        model = nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=1)
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "bf16" if dtype == torch.bfloat16 else "f32",
    }
    session = runtime.compile_model(model, "CPU", options)
    return with_forward(one, lambda arrays: session(arrays)[0])


class LastLayer(torch.nn.Module):
    """BERT as exporters take it: INPUTS by position, and one result."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states: Tensor = self.bert(input_ids, attention_mask).last_hidden_state
        return states


def inputs(one: Any, batch: list[str]) -> dict[str, Tensor]:
    features = one.preprocess(batch)
    return {name: features[name] for name in INPUTS}


def with_forward(one: Any, call: Callable[[dict[str, Any]], Any]) -> Any:
    """Replaces the model of an encoder by a function of arrays, which returns the last layer's."""

    def forward(**features: Any) -> dict[str, Tensor]:
        arrays = {name: features[name].numpy() for name in INPUTS}
        return {"last_hidden_state": torch.from_numpy(call(arrays))}

    one[0].model.forward = forward
    return one


PEERS: dict[str, Callable[[Path, torch.dtype, list[str]], Any]] = {
    "compile": compiled,
    "zentorch": partial(compiled, backend="zentorch"),
    "onnxruntime": onnx_runtime,
    "openvino": openvino,
    "torchao-int8": partial(compiled, int8=True),
    "onnxruntime-int8": partial(onnx_runtime, int8=True),
    "openvino-int8": partial(openvino, int8=True),
}
"""Load an encoder from a folder. A peer may change the weights, as zentorch does: each loads its
own."""
