"""HuggingFace models on shards of sequences (`distributed.context_parallel`).

A model describes the mask of its shard. Here it becomes that of the undivided sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ...dispatch import division
from ...dispatch.division import Division
from ...masks.constraints import Segments
from ...masks.mask import Mask
from .lazy_mask import LazyMask
from .packing import document_ids
from .padding import padding_mask
from .structure import Grid, MaskFunction, structure_of


def current_division() -> Division | None:
    """Returns the division that is in effect, unless it has a single rank."""
    here = division.current
    return None if here is None or here.ranks == 1 else here


@contextmanager
def watched_models() -> Iterator[None]:
    """Context that checks each call of a model of transformers on a divided sequence."""
    before = register_module_forward_pre_hook(_check_layers)
    after = register_module_forward_hook(_check_positions, with_kwargs=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _check_layers(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Raises ValueError for a model whose tokens meet elsewhere than in attention."""
    if _is_checked(module) and (mixer := _other_mixer(module)) is not None:
        raise ValueError(
            f"{type(module).__name__} does not run on a divided sequence (context_parallel): "
            f"{mixer} joins tokens outside of attention, within a shard only"
        )


def _is_checked(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel) and current_division() is not None


def _check_positions(
    module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: object
) -> None:
    """Raises ValueError for a model whose tokens have no positions. A hook that runs before the
    model would not see named arguments."""
    if not _is_checked(module):
        return
    name = type(module).__name__
    signature = inspect.signature(module.forward)
    passed = signature.bind_partial(*arguments, **named).arguments
    if passed.get("position_ids", named.get("position_ids")) is None:
        raise ValueError(
            f"{name} needs position_ids on a divided sequence (context_parallel), "
            + (
                "got None: pass context.shard(torch.arange(length)[None], dim=1)"
                if "position_ids" in signature.parameters
                else "which it does not take"
            )
        )


def _other_mixer(model: Any) -> str | None:
    """Returns what joins tokens besides attention, if anything: a layer whose cache has a state, a
    recurrent layer or a convolution. A model inside this one is checked when it is called."""
    from transformers import DynamicCache

    try:
        cache = DynamicCache(config=model.config)
    except (AttributeError, TypeError):  # a config without layers of a decoder
        cache = None
    if any(getattr(cache, "is_linear", ())):
        return "a layer with a recurrent state"
    for name, module in own_modules(model):
        if joins_tokens(module):
            return f"the layer {name}"
    return None


def joins_tokens(module: nn.Module) -> bool:
    """Tells whether a module of torch joins tokens: a recurrent layer or a convolution."""
    is_convolution = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
    return is_convolution or isinstance(module, nn.RNNBase)


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules inside by their names, except models of transformers."""
    from transformers import PreTrainedModel

    for name, child in module.named_children():
        if not isinstance(child, PreTrainedModel):
            yield prefix + name, child
            yield from own_modules(child, f"{prefix}{name}.")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def create_divided_mask(
    here: Division,
    grid: Grid,
    function: MaskFunction,
    attention_mask: Tensor | None,
    dtype: torch.dtype,
) -> LazyMask:
    """Returns the mask of the undivided sequence.

    Args:
        here: the division.
        grid: sizes of the shard.
        function: as in `create_mask`.
        attention_mask: padding mask of the shard, bool (B, M); True = a token.
        dtype: dtype of the result.

    Raises:
        ValueError: keys are cached, or the mask is none of causal, sliding windows, packed
            documents and padding.
    """
    if not grid.is_square:
        raise ValueError(
            f"the keys of a divided sequence cannot be cached: got {grid.M} queries and {grid.N} "
            f"keys from position {grid.q_offset} on"
        )
    whole = grid._replace(M=here.ranks * grid.M, N=here.ranks * grid.N)
    structure = structure_of(function, whole)
    if structure is None:
        raise ValueError(f"the mask function {function} is not supported on a divided sequence")
    mask = structure.mask(whole)
    if structure.is_packed:  # the documents of a shard; those of the sequence follow by position
        mask = Mask(tuple(one for one in mask.constraints if not isinstance(one, Segments)))
    if mask.tensors():
        kinds = ", ".join(type(one).__name__ for one in mask.constraints)
        raise ValueError(f"chunks and blocks are not supported on a divided sequence, got {kinds}")
    if attention_mask is not None:
        visible = here.unshard(attention_mask.byte(), 1).bool()
        mask = mask & padding_mask(visible, attention_mask, grid.M)
    size = grid.B, grid.M, grid.N
    return LazyMask(
        mask, size, grid.device, dtype, may_be_packed=True, tokens=attention_mask, is_divided=True
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def divided_documents(
    here: Division, position_ids: Tensor, tokens: Tensor | None, B: int
) -> Mask | None:
    """Returns the segments of packed documents; None if every row is one document.

    A collective: all ranks call it.

    Args:
        here: the division.
        position_ids: integers (B or 1, M), of this shard.
        tokens: padding mask of this shard, bool (B, M); True = a token.
        B: batch size.

    Raises:
        ValueError: the positions of all shards begin at 0.
    """
    M = position_ids.shape[1]
    whole = here.unshard(position_ids, 1)
    ids = document_ids(whole, None if tokens is None else here.unshard(tokens.byte(), 1).bool())
    if not ids.any():
        return None
    if bool(((whole == 0).sum(1) == here.ranks).all() and (whole < M).all()):
        raise ValueError(
            "every shard has the positions from 0 on: pass the position_ids of its tokens to the "
            "model, context.shard(torch.arange(length)[None], dim=1)"
        )
    return Mask.segments(here.shard(ids, 1).expand(B, -1))
