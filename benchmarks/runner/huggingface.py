"""Models of HuggingFace transformers with attention by "eager", "sdpa" and our kernels.

    python -m benchmarks.runner.huggingface
    python -m benchmarks.runner.huggingface --models bert t5 --dtypes bfloat16

Each model has the widths of a published one, two layers of each kind, a vocabulary of 1,000 and
random weights. It returns hidden states. "padded" rows have lengths spread evenly from a token to
the whole row. A training step is a forward and a backward pass. "decode" is a forward pass of one
token with a static cache of twice the prompt.

The implementations are interleaved. Outputs at tokens are first compared with those of "eager".
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor

from transformer_kernels.bench import Budget, Interleaver
from transformer_kernels.integrations.huggingface import NAME, register

IMPLEMENTATIONS = ("eager", "sdpa", NAME)
BAND = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest difference from "eager", relative to the largest value. "eager" itself rounds its weights
to half precision."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and its batch."""

    kind: str
    """transformers has classes `<kind>Model` and `<kind>Config`."""
    sizes: dict[str, Any]
    batch: int
    length: int
    """tokens of a row; of the encoder, if there is one"""
    padded: bool = False
    decodes: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    """tensors besides token ids, by shape"""


def _decoder(width: int, heads: int, kv_heads: int, size: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": 1000, "hidden_size": width, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "intermediate_size": hidden,
        "num_hidden_layers": 2, "pad_token_id": 0,
    }  # fmt: skip


_BASE = {"vocab_size": 1000, "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 2}
_LOCAL_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}

MODELS = {
    "bert": Model(
        kind="Bert",
        sizes=_BASE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        batch=8, length=512, padded=True,
    ),
    "modernbert": Model(
        kind="ModernBert", sizes=_BASE | {"pad_token_id": 0} | _LOCAL_AND_FULL,
        batch=4, length=1024, padded=True,
    ),
    "vit": Model(
        kind="ViT", sizes={"num_hidden_layers": 2}, batch=16, length=0,
        more={"pixel_values": (3, 224, 224)},
    ),
    "gpt2": Model(
        kind="GPT2",
        sizes={"vocab_size": 1000, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        | {"embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2, "n_positions": 2048},
        batch=4, length=1024, padded=True, decodes=True,
    ),
    "llama-3.2-1b": Model(
        kind="Llama", sizes=_decoder(2048, 32, 8, 64, 8192), batch=1, length=1024, decodes=True
    ),
    "qwen3-0.6b": Model(
        kind="Qwen3", sizes=_decoder(1024, 16, 8, 128, 3072), batch=2, length=1024, padded=True,
        decodes=True,
    ),
    "gemma2-2b": Model(
        kind="Gemma2", sizes=_decoder(2304, 8, 4, 256, 9216) | _LOCAL_AND_FULL,
        batch=1, length=1024, decodes=True,
    ),
    "gemma3-1b": Model(
        kind="Gemma3Text", sizes=_decoder(1152, 4, 1, 256, 6912) | _LOCAL_AND_FULL,
        batch=1, length=1024, decodes=True,
    ),
    "gpt-oss-20b": Model(
        kind="GptOss",
        sizes=_decoder(2880, 64, 8, 64, 2880) | _LOCAL_AND_FULL
        | {"num_local_experts": 2, "num_experts_per_tok": 2},
        batch=1, length=1024, decodes=True,
    ),
    "t5-base": Model(
        kind="T5",
        sizes={"vocab_size": 1000, "d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 2}
        | {"dropout_rate": 0.0},
        batch=4, length=512, padded=True,
    ),
    "whisper-small": Model(
        kind="Whisper",
        sizes={"vocab_size": 1000, "d_model": 768, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
        | {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "decoder_start_token_id": 1},
        batch=1, length=0, more={"input_features": (80, 3000)},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    dtype: torch.dtype
    what: str
    """forward, training step or decode"""
    milliseconds: dict[str, float]
    """by implementation, without those that the model refuses"""


def build(model: Model, dtype: torch.dtype, attn_implementation: str) -> Any:
    """Builds the model with random weights, the same for every implementation."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{model.kind}Config")(**model.sizes)
    config._attn_implementation = attn_implementation
    built = getattr(transformers, f"{model.kind}Model")(config)
    return built.to(dtype).eval()


def batch_of(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the arguments of the model."""
    generator = torch.Generator().manual_seed(0)
    arguments = {
        name: torch.randn(model.batch, *shape, generator=generator).to(dtype)
        for name, shape in model.more.items()
    }

    def ids(length: int) -> Tensor:
        return torch.randint(3, 1000, (model.batch, length), generator=generator)

    if model.length:
        arguments["input_ids"] = ids(model.length)
    if model.padded:
        lengths = torch.linspace(1, model.length, model.batch).round()
        arguments["attention_mask"] = (torch.arange(model.length) < lengths[:, None]).long()
    if model.kind in ("T5", "Whisper"):
        arguments["decoder_input_ids"] = ids(128)
    return arguments


def output_of(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """Returns the last hidden states, (B, length, width)."""
    hidden: Tensor = model(**arguments).last_hidden_state
    return hidden


def built_models(model: Model, dtype: torch.dtype) -> dict[str, Any]:
    """Builds the model with each implementation that it supports, and compares their outputs.

    Raises:
        AssertionError: an output at a token differs from that of "eager".
    """
    register()
    built, arguments = {}, batch_of(model, dtype)
    outputs = {}
    for name in IMPLEMENTATIONS:
        try:
            one = build(model, dtype, name)
            with torch.no_grad():
                outputs[name] = output_of(one, arguments)
        except ValueError as error:
            if name != "sdpa":
                raise
            print(f"{model.kind} without sdpa: {str(error).splitlines()[0]}")
            continue
        built[name] = one
    expected, visible = outputs["eager"], arguments.get("attention_mask")
    for name, output in outputs.items():
        off = (output - expected).abs()
        if visible is not None and visible.shape == off.shape[:2]:
            off = off[visible.bool()]
        largest = (off.max() / expected.abs().max()).item()
        assert largest <= BAND[dtype], f"{model.kind} {dtype}: {name} is {largest:.1e} off"
    return built


def measure(name: str, dtype: torch.dtype, seconds: float) -> Iterator[Row]:
    """Measures a model.

    Raises:
        AssertionError: an output at a token differs from that of "eager".
    """
    model = MODELS[name]
    arguments, built = batch_of(model, dtype), built_models(model, dtype)

    def forward(one: Any) -> Callable[[], object]:
        def run() -> Tensor:
            with torch.no_grad():
                return output_of(one, arguments)

        return run

    def step(one: Any) -> Callable[[], object]:
        one.zero_grad()
        return lambda: output_of(one, arguments).square().mean().backward()

    kinds: dict[str, Callable[[Any], Callable[[], object]]] = {
        "forward": forward,
        "training step": step,
    }
    if model.decodes:
        kinds["decode"] = _decode_of(model, arguments)
    for what, prepare in kinds.items():
        timer = Interleaver(
            {key: lambda one=one, prepare=prepare: prepare(one) for key, one in built.items()}  # type: ignore[misc]
        )
        timings = timer.run(Budget(seconds, fewest=3))
        yield Row(name, dtype, what, {key: timing.median_ms for key, timing in timings.items()})


def _decode_of(model: Model, arguments: dict[str, Tensor]) -> Callable[[Any], Callable[[], object]]:
    """Returns the set-up of a step with a static cache; the cache holds the prompt."""
    caches: dict[int, Any] = {}
    token = arguments["input_ids"][:, :1]

    def prepare(one: Any) -> Callable[[], object]:
        if id(one) not in caches:
            cache = transformers.StaticCache(config=one.config, max_cache_len=2 * model.length)
            with torch.no_grad():
                one(input_ids=arguments["input_ids"], past_key_values=cache)
            caches[id(one)] = cache

        def run() -> Tensor:
            with torch.no_grad():
                hidden: Tensor = one(
                    input_ids=token, past_key_values=caches[id(one)]
                ).last_hidden_state
                return hidden

        return run

    return prepare


def table(rows: Sequence[Row]) -> list[str]:
    """Formats a Markdown table with one line for each row."""
    lines = [
        "| model | batch | dtype | | ms: eager, sdpa, ours | over eager | over sdpa |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        model, ours = MODELS[row.model], row.milliseconds[NAME]
        times = [row.milliseconds.get(name) for name in IMPLEMENTATIONS]
        shown = ", ".join("-" if time is None else f"{time:.1f}" for time in times)
        ratios = " | ".join("-" if time is None else f"{time / ours:.2f}x" for time in times[:2])
        size = f"{model.batch} x {model.length or 'input'}{', padded' if model.padded else ''}"
        dtype = str(row.dtype).removeprefix("torch.")
        lines.append(f"| {row.model} | {size} | {dtype} | {row.what} | {shown} | {ratios} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.huggingface",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for line in table([])[:2]:
        print(line)
    for dtype in args.dtypes:
        for name in args.models:
            for row in measure(name, getattr(torch, dtype), args.seconds):
                print(table([row])[2], flush=True)


if __name__ == "__main__":
    main()
