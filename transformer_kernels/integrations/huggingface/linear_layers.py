"""Linear layers of hybrid models: which ones run our functions, and with which documents.

A file of a model in transformers defines functions and layers that call them. They are replaced by
ones that run ours in a call of a layer that asks for it, and the original otherwise. The base model
finds the packed documents, and passes them to its layers as an argument, so that they are known
when gradient checkpointing calls a layer again.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...common.torch_private import constant_in_compiled_code
from . import linear_functions
from .divided import joins_tokens, own_modules
from .lightning import lightning_attention
from .linear_functions import Call
from .models import NAME, source_of
from .packing import boundaries, boundaries_of_positions, check_rows

_Function = Callable[..., Any]

FUNCTIONS: dict[str, _Function] = {
    "causal_conv1d_fn": linear_functions.convolution,
    "causal_conv1d_update": linear_functions.convolution_step,
    "torch_chunk_gated_delta_rule": linear_functions.delta_rule,
    "torch_recurrent_gated_delta_rule": linear_functions.delta_rule,
    "chunk_kimi_delta_attention": linear_functions.delta_rule,
    "recurrent_kimi_delta_attention": linear_functions.delta_rule,
    "mamba2_chunk_scan": linear_functions.scan,
    "mamba2_selective_state_update": linear_functions.scan_step,
    "mamba2_split_conv1d_scan_combined": linear_functions.fused_mamba,
}
"""Our functions, by the names of those that they replace."""

_LIGHTNING = "MiniMaxLightningAttention"
_OF_ONE_TOKEN = "apply_mask_to_padding_states"
"""The other function that layers call."""
_DOCUMENTS = "packed_documents"
"""Argument by which a base model passes boundaries on to its layers, of attention too."""
_POSITIONS = "position_ids"
_CONFIG = "_config_of_model"
"""Attribute of a layer: the configuration of its model."""
_FILES = "transformers.models."


class _State(threading.local):
    call: Call | None = None
    """The call of a layer that runs our functions."""
    documents: Tensor | None = None
    """The boundaries in the call of a model."""


_state = _State()
_mode: bool | None = False
_replaced: dict[ModuleType, list[tuple[Any, str, Any]]] = {}
"""What was replaced in each file: owner, name, original."""
_requested: set[ModuleType] = set()
"""Files of models that asked for our attention."""


def set_mode(mode: bool | None) -> None:
    """Says which models run our functions in their linear layers.

    Args:
        mode: None: those with our attention. True: all. False: none; what was replaced is restored.
    """
    global _mode
    _mode = mode
    if mode is False:
        for originals in _replaced.values():
            for owner, name, original in reversed(originals):
                setattr(owner, name, original)
        _replaced.clear()
        return
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(_FILES)]
    for module in loaded if mode else _requested:
        _replace_in(module)


def prepare(model: type, *, asks: bool) -> None:
    """Replaces the functions and layers of a model, if it may run ours.

    Args:
        model: a subclass of PreTrainedModel.
        asks: it has our attention.
    """
    for base in model.__mro__:
        module = sys.modules.get(base.__module__)
        if module is not None and base.__module__.startswith(_FILES):
            if asks:
                _requested.add(module)
            if _mode or (asks and _mode is None):
                _replace_in(module)


def link(model: Any) -> None:
    """Tells the linear layers of a model, but not of models in it, its configuration."""
    for _, layer in own_modules(model):
        if type(layer) in _layers_of(type(layer).__module__):
            setattr(layer, _CONFIG, model.config)


@cache
def _layers_of(file: str) -> Mapping[Any, bool]:
    """Returns the linear layers of a file of transformers; True: documents can be separated."""
    module = sys.modules.get(file)
    if module is None or not file.startswith(_FILES):
        return {}
    found = {}
    for layer, names in _forward_passes(module, nn.Module):
        called = {name for name in names if _is_own_function(module, name)} - {_OF_ONE_TOKEN}
        if layer.__name__ == _LIGHTNING or called & FUNCTIONS.keys():
            found[layer] = called <= FUNCTIONS.keys()
    return found


def _forward_passes(module: ModuleType, kind: type) -> list[tuple[Any, tuple[str, ...]]]:
    """Returns the classes of a kind that a file defines, with the names in their forward passes."""
    return [
        (one, inspect.unwrap(vars(one)["forward"]).__code__.co_names)
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, kind)
        and one.__module__ == module.__name__
        and "forward" in vars(one)
    ]


def _is_own_function(module: ModuleType, name: str) -> bool:
    one = vars(module).get(name)
    is_function = callable(one) and not isinstance(one, type)
    return is_function and getattr(one, "__module__", None) == module.__name__


def _replace_in(module: ModuleType) -> None:
    from transformers import PreTrainedModel

    if module in _replaced:
        return
    layers = _layers_of(module.__name__)
    replaced: list[tuple[Any, str, Any]] = []
    new: list[_Function] = []
    for layer, is_separable in layers.items():
        replaced.append((layer, "forward", layer.forward))
        new.append(_layer_forward(layer.forward, is_separable, layer.__name__ == _LIGHTNING))
    if layers or "nn.Conv1d(" in (source_of(module) or ""):
        models = [
            (model, "layers" in names) for model, names in _forward_passes(module, PreTrainedModel)
        ]
        take_positions = all(_POSITIONS in _parameters(one.forward) for one, base in models if base)
        for model, is_base in models:
            if is_base or not take_positions:
                replaced.append((model, "forward", model.forward))
                new.append(_model_forward(model.forward, is_base))
    for name, ours in FUNCTIONS.items() if layers else ():
        if name in vars(module):
            original = vars(module)[name]
            replaced.append((module, name, original))
            new.append(_function(original, ours))
    for (owner, name, _), function in zip(replaced, new, strict=True):
        setattr(owner, name, function)
    _replaced[module] = replaced


def _asks(config: Any) -> bool:
    if _mode is None:
        return getattr(config, "_attn_implementation", None) == NAME
    return _mode


def _function(original: _Function, ours: _Function) -> _Function:
    """Returns a function that runs ours in a layer that asks for it."""

    @wraps(original)
    def run(*args: Any, **named: Any) -> Any:
        call = _state.call
        if call is None:
            return original(*args, **named)
        result = ours(call, *args, **named)
        if result is not NotImplemented:
            return result
        if call.documents is not None:
            raise ValueError(
                f"{original.__name__} cannot separate packed documents with these arguments: pass "
                "one document in a row"
            )
        return original(*args, **named)

    return run


def _layer_forward(original: _Function, is_separable: bool, is_lightning: bool) -> _Function:
    """Returns the forward pass of a linear layer, which runs our functions if it asks for them."""

    @wraps(original)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        documents = named.pop(_DOCUMENTS, None)
        if not _asks(getattr(self, _CONFIG, None)):
            return original(self, *args, **named)
        hidden_states = args[0] if args else named["hidden_states"]
        if documents is None:
            documents = _given_documents(named, hidden_states)
            if (documents is not None and not is_separable) or _state.documents is not None:
                raise ValueError(_NOT_SEPARATE.format(type(self).__name__))
        call = Call(hidden_states.shape[1], documents)
        if is_lightning:
            return lightning_attention(call, self, *args, **named)
        before = _state.call
        _state.call = call
        try:
            return original(self, *args, **named)
        finally:
            _state.call = before

    return forward


_NOT_SEPARATE = "{} cannot separate packed documents: pass one document in a row"


def _model_forward(original: _Function, is_base: bool) -> _Function:
    """Returns the forward pass of a model that finds packed documents.

    A base model tells its layers. Another one tells the base model in it, if it keeps the arguments
    that would show them to itself, as that of Mamba-2 does.
    """
    names = _parameters(original)[1:]

    @wraps(original)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if not _asks(self.config):
            return original(self, *args, **named)
        documents = _documents(dict(zip(names, args, strict=False)) | named)
        if documents is None:
            documents = _state.documents
        if is_base and documents is not None:
            _check_is_separable(self)
            named[_DOCUMENTS] = documents
        before = _state.documents
        _state.documents = documents
        try:
            return original(self, *args, **named)
        finally:
            _state.documents = before

    return forward


def _parameters(function: _Function) -> list[str]:
    return list(inspect.signature(function).parameters)


def _documents(given: Mapping[str, Any]) -> Tensor | None:
    """Returns the boundaries of packed documents in a call of a base model, if there are any."""
    ids: Tensor | None = given.get("input_ids")
    tokens: Tensor | None = given.get("inputs_embeds") if ids is None else ids
    if tokens is None or tokens.shape[1] == 1:
        return None
    documents = _given_documents(given, tokens)
    position_ids: Tensor | None = given.get(_POSITIONS)
    if documents is not None or position_ids is None:
        return documents
    mask = given.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = mask.get("linear_attention")
    B, T = tokens.shape[:2]
    visible = mask[:, -T:].bool() if mask is not None and mask.dim() == 2 else None
    if position_ids.dim() == 3:  # of text, time, height and width, or of the last three
        position_ids = position_ids[0]
    found: Tensor | None = boundaries_of_positions(position_ids, visible, B)
    return found


def _given_documents(named: Mapping[str, Any], tokens: Tensor) -> Tensor | None:
    """Returns the boundaries that the arguments of a call of a model or layer give."""
    B, T = tokens.shape[:2]
    cu_seqlens: Tensor | None = named.get("cu_seq_lens_q")
    seq_idx: Tensor | None = named.get("seq_idx")
    if T == 1:
        return None
    if cu_seqlens is not None:
        check_rows("cu_seq_lens_q", cu_seqlens, B, T)
        return cu_seqlens.to(tokens.device, torch.int32)
    return None if seq_idx is None else boundaries(seq_idx.expand(B, T))


def _check_is_separable(model: nn.Module) -> None:
    """Raises ValueError if tokens of packed documents meet in a layer of a model."""
    if (layer := _inseparable_layer(model)) is not None:
        raise ValueError(_NOT_SEPARATE.format(f"{type(model).__name__}, with the layer {layer},"))


@constant_in_compiled_code
def _inseparable_layer(model: nn.Module) -> str | None:
    inside = ""
    for name, module in own_modules(model):
        if inside and name.startswith(inside):
            continue
        is_separable = _layers_of(type(module).__module__).get(type(module))
        if is_separable:
            inside = f"{name}."
        elif is_separable is False or joins_tokens(module) or _is_indexer(module):
            return f"{name} ({type(module).__name__})"
    return None


def _is_indexer(module: nn.Module) -> bool:
    """Tells whether a module chooses keys: among those of all documents, if keys are cached."""
    return type(module).__name__.endswith("Indexer")
