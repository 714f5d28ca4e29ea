"""Shapes of the attention of a model, from its configuration in the format of HuggingFace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .masks import FULL, MaskOption
from .shapes import Shape

CONTEXT = 2048
"""Default number of tokens; fewer for models with fewer positions."""

_NAMES = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "key heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "head width": ("head_dim", "d_kv", "attention_head_dim"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"),
}
"""Names of a size in different configurations; the first one that is a number counts."""

_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that generate text."""


@dataclass(frozen=True)
class ModelCall:
    """One kind of attention call of a model."""

    name: str
    shape: Shape
    mask: MaskOption
    trains: bool
    """False for a step of decoding, which has no backward pass"""


def model_calls(path: Path, *, batch: int = 1, context: int | None = None) -> list[ModelCall]:
    """Returns the calls of a model: prefill and one step of decoding, or an encoder's.

    Layers with a sliding window are calls of their own.

    Args:
        path: config.json of the model; a folder stands for the config.json in it.
        batch: number of sequences.
        context: number of tokens; CONTEXT by default.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a configuration of a transformer, or has fewer positions.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected an object, got {type(config).__name__}")
    text = {**config, **config.get("text_config", {})}
    return list(_calls(text, str(path), batch, context))


def _calls(
    config: Mapping[str, Any], path: str, batch: int, context: int | None
) -> Iterator[ModelCall]:
    heads = _size(config, "heads", path)
    key_heads = _optional_size(config, "key heads") or heads
    width = _optional_size(config, "head width") or _size(config, "width", path) // heads
    positions = _optional_size(config, "positions")
    if context is not None and positions is not None and context > positions:
        raise ValueError(f"{path}: the model has {positions} positions, got --context {context}")
    tokens = context or min(CONTEXT, positions or CONTEXT)
    sizes = {"B": batch, "H_q": heads, "H_kv": key_heads, "N": tokens, "D": width, "D_v": width}
    name = str(config.get("model_type", "model"))
    if not _generates(config):
        yield ModelCall(f"{name}, encoder", Shape(**sizes, M=tokens), FULL, True)
        return
    for kind, window in _windows(config):
        mask = "causal" if window is None or window >= tokens else f"window:{window}"
        option = MaskOption.parse(mask)
        yield ModelCall(f"{name}, prefill{kind}", Shape(**sizes, M=tokens), option, True)
        seen = min(tokens, window or tokens)
        step = Shape(**{**sizes, "N": seen}, M=1)  # a cache of the window alone
        yield ModelCall(f"{name}, decoding{kind}", step, FULL, False)


def _generates(config: Mapping[str, Any]) -> bool:
    """True for a model that generates text, and for one whose architecture is not given."""
    names = config.get("architectures") or _LANGUAGE
    return config.get("is_decoder") is True or any(str(n).endswith(_LANGUAGE) for n in names)


def _windows(config: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Kinds of layers: the text to add to a call's name, and the window or None."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return [("", None)]
    kinds = config.get("layer_types")
    if kinds is None:
        return [("", window)]
    named = {"full_attention": (", full", None), "sliding_attention": (", window", window)}
    return [named[kind] for kind in dict.fromkeys(kinds) if kind in named] or [("", None)]


def _size(config: Mapping[str, Any], what: str, path: str) -> int:
    size = _optional_size(config, what)
    if size is None:
        raise ValueError(f"{path}: no {what}: expected one of {', '.join(_NAMES[what])}")
    return size


def _optional_size(config: Mapping[str, Any], what: str) -> int | None:
    for name in _NAMES[what]:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
