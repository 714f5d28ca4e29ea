"""The mask function: HuggingFace's description of a mask -> `LazyMask`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...masks.mask import Mask
from .divided import create_divided_mask, current_division
from .lazy_mask import LazyMask, additive
from .padding import padding_mask
from .structure import Grid, MaskFunction, structure_of


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    *,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **rest: Any,
) -> Tensor:
    """Returns the attention mask of a forward pass, (B, 1, M, N), in the form of "eager".

    Its values are added to the scores: 0 = visible, the least number of the dtype = hidden. They
    are right in any model that runs with "eager". Its attribute `mask` is the `Mask` that the
    attention function uses, also where every key is visible: the meaning of a missing mask depends
    on the module.

    The result is a `LazyMask`, except while a graph is traced. The mask has structure if it is an
    intersection of causal masks, windows, chunks, packed documents, padding, and unions of windows
    and blocks; while a graph is traced, if it is causal or full. Otherwise it is dense. Under
    `distributed.context_parallel` it is the mask of the undivided sequence.

    Args:
        batch_size: B.
        q_length: M.
        kv_length: N, which includes cached keys.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: (batch, head, query, key) indices -> visible, from
            `transformers.masking_utils`. Default: causal.
        attention_mask: padding mask, bool (B, length); True = a token. Keys past its end are
            hidden.
        allow_is_causal_skip: False for a step with a static cache.
        device: device of the mask.
        dtype: floating-point dtype of the mask.
        rest: other arguments of the library's mask functions.

    Source: `transformers.masking_utils.eager_mask`.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
    from transformers.utils.import_utils import is_tracing

    function = causal_mask_function if mask_function is None else mask_function
    grid = Grid(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
    if (here := current_division()) is not None:
        divided: Tensor = create_divided_mask(here, grid, function, attention_mask, dtype)
        return divided
    use_vmap = rest.get("use_vmap", False)
    tokens = None if attention_mask is None else _tokens(attention_mask, grid)
    structure, in_graph = None, is_tracing(attention_mask)
    if not in_graph:
        grid = grid._replace(q_offset=_offset(grid, is_static=not allow_is_causal_skip))
        structure = structure_of(function, grid)
    if structure is None:
        visible = _dense_mask(grid, function, attention_mask, use_vmap)
        mask, may_be_packed = Mask.dense(visible), grid.is_square
        if in_graph:  # where a LazyMask cannot be created; the values must not be changed in place
            if attention_mask is None and function is bidirectional_mask_function:
                mask = Mask()
            elif attention_mask is None and grid.is_square and function is causal_mask_function:
                mask = Mask.causal()
            values: Any = additive(visible, dtype)
            values.mask, values.may_be_packed, values.tokens = mask, may_be_packed, tokens
            return values  # type: ignore[no-any-return]
    else:
        mask, may_be_packed = structure.mask(grid), grid.is_square and not structure.is_packed
        if tokens is not None:
            mask = mask & padding_mask(tokens, tokens, grid.M, keep_full=grid.is_static_step)
    size = batch_size, q_length, kv_length
    return LazyMask(mask, size, grid.device, dtype, may_be_packed=may_be_packed, tokens=tokens)


def _dense_mask(
    grid: Grid, function: MaskFunction, attention_mask: Tensor | None, use_vmap: bool
) -> Tensor:
    """Returns the visible pairs, bool (B, 1, M, N)."""
    from transformers.masking_utils import sdpa_mask

    visible: Any = sdpa_mask(
        batch_size=grid.B, q_length=grid.M, kv_length=grid.N,
        q_offset=grid.q_offset, kv_offset=grid.kv_offset,  # type: ignore[arg-type]
        mask_function=function, attention_mask=attention_mask, device=grid.device,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap,
    )  # fmt: skip
    return visible  # type: ignore[no-any-return]


def _offset(grid: Grid, *, is_static: bool) -> int | Tensor:
    """Returns the offset as a tensor for a single query of a static cache, else as an int.

    The windows of a single query are then key ranges, whose values are not part of compiled code.
    The offset of a prompt stays a tensor on a GPU, so that the host does not wait.
    """
    offset = grid.q_offset
    if isinstance(offset, int):
        return torch.tensor(offset, device=grid.device) if grid.M == 1 and is_static else offset
    return int(offset) if grid.M > 1 and offset.is_cpu else offset


def _tokens(attention_mask: Tensor, grid: Grid) -> Tensor:
    """Returns the padding mask of the keys, (B, N); keys past the end of (B, length) are hidden."""
    tokens = attention_mask[:, grid.kv_offset : grid.kv_offset + grid.N]
    if tokens.shape[1] < grid.N:
        tokens = functional.pad(tokens, (0, grid.N - tokens.shape[1]))
    return tokens
