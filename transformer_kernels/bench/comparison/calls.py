"""Calls to measure: shapes and masks as given on the command line, and those of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...masks.mask import Mask
from ..cases import Case, Direction
from ..provenance import CPU

MASKS = "full, causal, window:W, padding:LENGTHS or document:LENGTHS, or several joined by +"

CHECKED_PAIRS = 2**22
"""Largest M x N that is compared with float64. Longer sequences are compared at half their length,
or a quarter, and so on."""

CONTEXT = 2048
"""Default number of tokens of a model; fewer for models with fewer positions."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call."""

    B: int
    H_q: int
    H_kv: int
    M: int
    N: int
    D: int
    D_v: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.H_q % self.H_kv:
            raise ValueError(f"H_q must be a multiple of H_kv, got {self.H_q} and {self.H_kv}")

    @staticmethod
    def parse(text: str) -> Shape:
        """Parses "B,H_q,H_kv,M,N,D" or "B,H_q,H_kv,M,N,D,D_v"; D_v is D by default.

        Raises:
            ValueError: the text has another form, or a size is not valid.
        """
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+){5,6}\s*", text, re.ASCII):
            raise ValueError(
                f"expected B,H_q,H_kv,M,N,D[,D_v], such as 1,32,8,2048,2048,128, got {text!r}"
            )
        sizes = [int(word) for word in text.split(",")]
        names = [field.name for field in fields(Shape)]
        return Shape(**dict(zip(names, [*sizes, sizes[-1]], strict=False)))

    def __str__(self) -> str:
        heads = f"{self.H_q}" if self.H_q == self.H_kv else f"{self.H_q}/{self.H_kv}"
        lengths = f"{self.M}" if self.M == self.N else f"{self.M} x {self.N}"
        width = f"{self.D}" if self.D_v == self.D else f"{self.D}/{self.D_v}"
        return f"B {self.B}, H {heads}, S {lengths}, D {width}"


def mask_for(text: str, shape: Shape, *, cut: bool = False) -> Mask | None:
    """Returns the mask of a call; None if every pair is visible.

    Args:
        text: MASKS. LENGTHS are numbers separated by commas, or a file of numbers.
        shape: sizes of the call.
        cut: accept lengths for a larger shape, and use the first sequences and tokens.

    Raises:
        ValueError: the text or a file has another form, or the lengths do not fit the shape.
        OSError: a file cannot be read.
    """
    masks = [mask for part in text.split("+") if (mask := _mask(part, shape, cut)) is not None]
    return Mask(tuple(one for mask in masks for one in mask.constraints)) if masks else None


def _mask(text: str, shape: Shape, cut: bool) -> Mask | None:
    name, separator, argument = text.strip().partition(":")
    if name in ("full", "causal") and not separator:
        # A single query is the last one, and sees every key.
        hides = name == "causal" and shape.M > 1
        return _window(None, shape) if hides else None
    if name == "window" and argument.isascii() and argument.isdecimal() and int(argument) > 0:
        return _window(int(argument) - 1, shape)
    if name in ("padding", "document") and argument:
        lengths = _lengths(argument)
        return (_padding if name == "padding" else _documents)(lengths, shape, cut)
    raise ValueError(f"expected {MASKS}, got {text!r}")


def _window(left: int | None, shape: Shape) -> Mask:
    """The last query sees the last key."""
    return Mask.window(left, 0, align="top_left" if shape.M == shape.N else "bottom_right")


def _padding(lengths: list[int], shape: Shape, cut: bool) -> Mask:
    if len(lengths) < shape.B or (not cut and (len(lengths) > shape.B or max(lengths) > shape.N)):
        raise ValueError(
            f"padding needs {shape.B} lengths of at most {shape.N}, one for each sequence, got "
            f"{len(lengths)} of at most {max(lengths)}"
        )
    return Mask.padding(torch.tensor(lengths[: shape.B]).clamp(max=shape.N))


def _documents(lengths: list[int], shape: Shape, cut: bool) -> Mask:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    if shape.M != shape.N or len(ids) < shape.N or (not cut and len(ids) > shape.N):
        raise ValueError(
            "documents need M = N tokens, and lengths with this sum; got "
            f"M = {shape.M}, N = {shape.N} and a sum of {len(ids)}"
        )
    return Mask.segments(ids[: shape.N].expand(shape.B, -1).contiguous())


def _lengths(argument: str) -> list[int]:
    text = argument
    if not argument.replace(",", "").isdecimal():
        text = Path(argument).read_text(encoding="utf-8")
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{argument}: expected positive lengths, got {text[:40]!r}")
    return [int(word) for word in words]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call to measure."""

    name: str = ""
    shape: Shape
    mask: str
    """as for `mask_for`"""
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    directions: tuple[Direction, ...] = ("fwd", "fwd+bwd")

    def __str__(self) -> str:
        return f"{self.shape}, {self.mask}, {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def case(self) -> Case:
        """Raises OSError or ValueError if the mask is not valid, as for `mask_for`."""
        return self._case(self.shape, cut=False)

    def checked_case(self) -> Case:
        """Returns the case that is compared with float64: this one, or one with fewer tokens."""
        shape = self.shape
        while shape.M * shape.N > CHECKED_PAIRS:
            shape = replace(shape, M=-(-shape.M // 2), N=-(-shape.N // 2))
        return self._case(shape, cut=True)

    def _case(self, shape: Shape, *, cut: bool) -> Case:
        mask = mask_for(self.mask, shape, cut=cut)
        case = Case(name=self.name, **vars(shape), dtype=self.dtype, mask=mask, mask_name=self.mask)
        return case.to(self.device)


_SIZES = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "key heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "head width": ("head_dim", "d_kv", "attention_head_dim"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"),
}
"""Names of a size in different configurations; the first one that is a number counts."""

_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that generate text."""


def model_calls(
    path: Path,
    *,
    batch: int = 1,
    context: int | None = None,
    directions: tuple[Direction, ...] = ("fwd", "fwd+bwd"),
) -> list[Call]:
    """Returns the calls of a HuggingFace model: prefill and a step of decoding, or an encoder's.

    Layers with a sliding window are calls of their own.

    Args:
        path: config.json of the model; a folder stands for the config.json in it.
        batch: number of sequences.
        context: number of tokens; CONTEXT by default.
        directions: directions of all calls but steps of decoding, which have no backward pass.

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
    config = {**config, **config.get("text_config", {})}

    def needed(name: str) -> int:
        if (size := _size(config, name)) is None:
            raise ValueError(f"{path}: no {name}: expected one of {', '.join(_SIZES[name])}")
        return size

    heads, positions = needed("heads"), _size(config, "positions")
    D = _size(config, "head width") or needed("width") // heads
    if context is not None and positions is not None and context > positions:
        raise ValueError(f"{path}: the model has {positions} positions, got --context {context}")
    N = context or min(CONTEXT, positions or CONTEXT)
    H_kv = _size(config, "key heads") or heads
    shape = Shape(B=batch, H_q=heads, H_kv=H_kv, M=N, N=N, D=D, D_v=D)
    return list(_calls(config, shape, directions))


def _size(config: Mapping[str, Any], name: str) -> int | None:
    values = (config.get(key) for key in _SIZES[name])
    return next((value for value in values if type(value) is int and value > 0), None)


def _calls(
    config: Mapping[str, Any], shape: Shape, directions: tuple[Direction, ...]
) -> Iterator[Call]:
    model = str(config.get("model_type", "model"))
    # An architecture that is not given counts as one that generates text.
    architectures = config.get("architectures") or _LANGUAGE
    generates = config.get("is_decoder") is True
    if not (generates or any(str(name).endswith(_LANGUAGE) for name in architectures)):
        yield Call(name=f"{model}, encoder", shape=shape, mask="full", directions=directions)
        return
    for kind, window in _windows(config):
        seen = min(shape.N, window or shape.N)
        mask = "causal" if seen == shape.N else f"window:{window}"
        yield Call(name=f"{model}, prefill{kind}", shape=shape, mask=mask, directions=directions)
        step = replace(shape, M=1, N=seen)  # a cache of the window alone
        yield Call(name=f"{model}, decoding{kind}", shape=step, mask="full", directions=("fwd",))


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
