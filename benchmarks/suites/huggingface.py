"""Models of HuggingFace transformers with attention by "eager", "sdpa" and our kernels.

Each model has the widths of a published one, two layers of each kind, a vocabulary of 1,000 and
random weights. It returns hidden states. "padded" rows have lengths spread evenly from a token to
the whole row. `fwd+bwd` is a forward and a backward pass; `decode` a forward pass of one token with
a static cache of twice the prompt. "cpu-packed" is our kernels on the tokens of all rows in one,
without padding, as `DataCollatorWithFlattening` makes it. Outputs at tokens are first compared with
those of "eager".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner.checks import Sizes, relative_error
from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels.bench import Direction
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.workload import Workload
from transformer_kernels.integrations.huggingface import NAME, register

IMPLEMENTATIONS = {"naive": "eager", "sdpa": "sdpa", "cpu": NAME, "cpu-packed": NAME}
"""`attn_implementation` by the variant in rows."""
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
    packs: bool = False
    """the padded rows are measured in one row too"""
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
        batch=8, length=512, padded=True, packs=True,
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
        packs=True, decodes=True,
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


def comparisons() -> Iterator[Comparison]:
    for name, model in MODELS.items():
        for dtype in BAND:
            yield Comparison(
                name=f"{name}-{str(dtype).removeprefix('torch.')}",
                measurements=partial(compared, name, model, dtype),
            )


def build(model: Model, dtype: torch.dtype, attn_implementation: str) -> Any:
    """Builds the model with random weights, the same for every implementation."""
    import transformers

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


def packed(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tokens of padded rows in one row, their positions and boundaries."""
    visible = arguments["attention_mask"].bool()
    lengths = visible.sum(1)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    positions = torch.arange(visible.shape[1]).expand_as(visible)
    rows = {"input_ids": arguments["input_ids"], "position_ids": positions}
    joined = {name: row[visible][None] for name, row in rows.items()}
    return joined | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


def output_of(model: Any, arguments: dict[str, Any]) -> Tensor:
    """Returns the last hidden states, (B, length, width)."""
    hidden: Tensor = model(**arguments).last_hidden_state
    return hidden


def compared(name: str, model: Model, dtype: torch.dtype, run: Run) -> Iterator[Measurement]:
    """Measures a model with each implementation that it supports.

    Raises:
        AssertionError: an output at a token differs from that of "eager".
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    register()
    arguments = batch_of(model, dtype)
    visible = arguments.get("attention_mask")
    built: dict[str, tuple[Any, dict[str, Tensor]]] = {}
    errors: dict[str, float] = {}
    expected: Tensor | None = None
    for variant, implementation in IMPLEMENTATIONS.items():
        if variant == "cpu-packed" and not model.packs:
            continue
        given = packed(arguments) if variant == "cpu-packed" else arguments
        try:
            one = build(model, dtype, implementation)
            with torch.no_grad():
                output = output_of(one, given)
        except ValueError as error:
            if variant != "sdpa":
                raise
            run.skipped.append(f"{name}: sdpa: {str(error).splitlines()[0]}")
            continue
        if visible is not None and visible.shape == output.shape[:2]:
            output = output[visible.bool()]
        output = output.flatten(0, -2)
        expected = output if expected is None else expected
        label = f"{model.kind}, {dtype}: {variant}"
        errors[variant] = relative_error(label, output, expected, BAND[dtype])
        built[variant] = one, given
    case = sizes_of(name, model, built["naive"][0].config, arguments, dtype)
    kinds: list[tuple[Sizes, Direction, Callable[..., Workload]]] = [
        (case, "fwd", forward),
        (case, "fwd+bwd", backward),
    ]
    if model.decodes:
        one_token = replace(case, name=f"{name}, decode", M=1, N=2 * model.length)
        kinds.append((one_token, "fwd", Decoding(model, arguments)))
    for sizes, direction, prepare in kinds:
        contenders = [
            Contender(sizes, direction, variant, partial(prepare, *of_variant), errors[variant])
            for variant, of_variant in built.items()
            if sizes is case or variant != "cpu-packed"
        ]
        yield run.timed(contenders, replace(run.budget, fewest=3))


def sizes_of(
    name: str, model: Model, config: Any, arguments: dict[str, Tensor], dtype: torch.dtype
) -> Sizes:
    """Columns of the rows: the sizes of the model's first attention."""
    config = config.get_text_config()
    heads, width = config.num_attention_heads, config.hidden_size
    D = getattr(config, "head_dim", None) or width // heads
    length = model.length or next(iter(arguments.values())).shape[-1]
    return Sizes(
        name=f"{name}, padded" if model.padded else name, B=model.batch, H_q=heads,
        H_kv=getattr(config, "num_key_value_heads", heads), M=length, N=length, D=D, D_v=D,
        dtype=dtype,
    )  # fmt: skip


def forward(one: Any, arguments: dict[str, Any]) -> Workload:
    return partial(torch.no_grad()(output_of), one, arguments)


def backward(one: Any, arguments: dict[str, Tensor]) -> Workload:
    one.zero_grad()
    return lambda: output_of(one, arguments).square().mean().backward()


class Decoding:
    """Steps with static caches, one for each model, which hold the prompt."""

    def __init__(self, model: Model, arguments: dict[str, Tensor]) -> None:
        self._length = 2 * model.length
        self._prompt = arguments["input_ids"]
        self._caches: dict[int, Any] = {}

    def __call__(self, one: Any, arguments: dict[str, Tensor]) -> Workload:
        from transformers import StaticCache

        if id(one) not in self._caches:
            cache = StaticCache(config=one.config, max_cache_len=self._length)
            self._caches[id(one)] = cache
            forward(one, {"input_ids": self._prompt, "past_key_values": cache})()
        token: dict[str, Any] = {
            "input_ids": self._prompt[:, :1],
            "past_key_values": self._caches[id(one)],
        }
        return forward(one, token)
