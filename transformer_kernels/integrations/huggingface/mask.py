"""The mask function: HuggingFace's description of a mask -> `LazyMask`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from transformer_kernels.integrations.huggingface.divided import (
    create_divided_mask,
    current_division,
)
from transformer_kernels.integrations.huggingface.lazy_mask import LazyMask
from transformer_kernels.integrations.huggingface.padding import padding_mask
from transformer_kernels.integrations.huggingface.structure import (
    Grid,
    MaskFunction,
    structure_of,
)
from transformer_kernels.masks.mask import Mask

_CAUSAL = Mask.causal().constraints


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
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Tensor | None:
    """Returns the attention mask of a forward pass: bool (B, 1, M, N), or None.

    None means as for "sdpa": causal in modules that are causal, if M > 1, and otherwise every key.
    The result is a `LazyMask` if the mask is an intersection of causal masks, windows, chunks,
    packed documents and padding. Otherwise, and while a graph is traced, it is the dense mask of
    "sdpa". Under `distributed.context_parallel` it is the mask of the undivided sequence.

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
        allow_is_causal_skip: None may be returned for a causal mask.
        allow_is_bidirectional_skip: None may be returned if every key is visible.
        device: device of the mask.
        rest: other arguments of the library's mask functions.

    Source: `transformers.masking_utils.sdpa_mask`.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    function = causal_mask_function if mask_function is None else mask_function
    grid = Grid(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
    if (here := current_division()) is not None:
        divided: Tensor = create_divided_mask(here, grid, function, attention_mask)
        return divided
    structure = None
    if not is_tracing(attention_mask):
        grid = grid._replace(q_offset=_offset(grid, is_static=not allow_is_causal_skip))
        structure = structure_of(function, grid)
    may_be_packed = attention_mask is None and grid.is_square
    if structure is None:
        dense: Tensor | None = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length,
            q_offset=q_offset, kv_offset=kv_offset,  # type: ignore[arg-type]
            mask_function=function, attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device, **rest,
        )  # fmt: skip
        if dense is not None:
            dense.may_be_packed = may_be_packed  # type: ignore[attr-defined]
        return dense
    mask = structure.mask
    if attention_mask is not None:
        mask = mask & _padding(attention_mask, grid)
    skip_all_visible = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length == 1)
    if skip_all_visible and not mask.constraints:
        return None
    if allow_is_causal_skip and may_be_packed and mask.constraints == _CAUSAL:
        return None
    may_be_packed = may_be_packed and not structure.is_packed
    return LazyMask(mask, (batch_size, q_length, kv_length), grid.device, may_be_packed)


def _offset(grid: Grid, *, is_static: bool) -> int | Tensor:
    """Returns the offset as a tensor for a single query of a static cache, else as an int.

    The windows of a single query are then key ranges, whose values are not part of compiled code.
    The offset of a prompt stays a tensor on a GPU, so that the host does not wait.
    """
    offset = grid.q_offset
    if isinstance(offset, int):
        return torch.tensor(offset, device=grid.device) if grid.M == 1 and is_static else offset
    return int(offset) if grid.M > 1 and offset.is_cpu else offset


def _padding(visible: Tensor, grid: Grid) -> Mask:
    """The mask of a padding mask (B, length); keys past its end are hidden."""
    visible = visible[:, grid.kv_offset : grid.kv_offset + grid.N]
    if visible.shape[1] < grid.N:
        visible = functional.pad(visible, (0, grid.N - visible.shape[1]))
    return padding_mask(visible, visible, grid.M, keep_full=grid.is_static_step)
