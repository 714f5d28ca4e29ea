"""The mask function: the values of "eager", with the structure kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.integrations.huggingface.tiny_models import PADDINGS, padding, transformers
from transformer_kernels import Mask
from transformer_kernels.integrations.huggingface import structure
from transformer_kernels.integrations.huggingface.attention import attention_forward
from transformer_kernels.integrations.huggingface.lazy_mask import LazyMask, additive
from transformer_kernels.integrations.huggingface.mask import create_mask
from transformer_kernels.masks.constraints import (
    Dense,
    Intervals,
    KeyRange,
    Positions,
    Segments,
    Window,
)

pytestmark = pytest.mark.exhaustive  # `make test` does not install transformers

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [0] * 11, list(range(11))])

IMAGES = pad(
    torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 2, 2, -1, -1], [0] * 5 + [-1] * 6, [-1] * 6 + [3] * 5]),
    (0, 4), value=-1,
)  # fmt: skip
"""Blocks of the tokens of images, and no block at positions of a cache that are not in use."""
ONE_IMAGE = torch.where(torch.arange(45).reshape(3, 15) % 4 < 2, 0, -1)
SCATTERED = torch.arange(45).reshape(3, 15) % 4 - 1


def mask_functions() -> dict[str, Callable[..., Any]]:
    """Functions of `transformers.masking_utils` by the names of the tests."""
    library = masking_utils()
    causal = library.causal_mask_function
    chunks = library.chunked_causal_mask_function(3, torch.tensor([0, 1, 2]))

    def packed(function: Callable[..., Any]) -> Any:
        same = DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]
        positions = same.tril().sum(-1) - 1
        return library.packed_sequence_compatibility_function(function, positions, DOCUMENTS)

    def joined(function: Callable[..., Any], ids: Tensor = IMAGES) -> Any:
        return library.or_masks(function, library.blockwise_overlay(ids))

    sliding = library.sliding_window_causal_mask_function(4)
    both_ways = models_overlay(4)
    local = library.sliding_window_overlay(3)
    return {
        "blocks": joined(causal),
        "blocks_local": library.and_masks(joined(causal), local),
        "blocks_or_sliding": joined(sliding),
        "blocks_or_either_way": joined(library.or_masks(sliding, both_ways)),
        "one_block": joined(causal, ONE_IMAGE),
        "one_block_local": library.and_masks(joined(causal, ONE_IMAGE), local),
        "no_block": joined(sliding, torch.full_like(IMAGES, -1)),
        "blocks_alone": library.blockwise_overlay(IMAGES[:, :11]),
        "always": library.or_masks(causal, lambda *args: torch.tensor(True, dtype=torch.bool)),
        "either_way": library.or_masks(sliding, both_ways),
        "scattered_blocks": joined(causal, SCATTERED),
        "one_block_or_sliding": joined(sliding, ONE_IMAGE),
        "causal": causal,
        "bidirectional": library.bidirectional_mask_function,
        "sliding": sliding,
        "sliding_both_ways": library.sliding_window_bidirectional_mask_function(3),
        "chunked": chunks,
        "packed": packed(causal),
        "packed_sliding": packed(library.sliding_window_causal_mask_function(3)),
        "packed_chunked": packed(chunks),
        "either": library.or_masks(causal, lambda b, h, q, k: k == 7),
        "custom": lambda b, h, q, k: (q + k) % 3 != 0,
    }


def models_overlay(size: int) -> Callable[..., Any]:
    """The window of a bidirectional model, which is defined in the model's file."""
    from transformers.models.gemma3 import modeling_gemma3 as library

    overlay: Callable[..., Any] = library._bidirectional_window_overlay(size)
    return overlay


def masking_utils() -> Any:
    transformers()
    from transformers import masking_utils as library

    return library


def bool_padding(kind: str) -> Tensor | None:
    visible = padding(kind, 11)
    return None if visible is None else visible.bool()


NAMES = (
    *("causal", "bidirectional", "sliding", "sliding_both_ways", "chunked", "packed"),
    *("packed_sliding", "packed_chunked", "either", "custom", "blocks", "blocks_local"),
    *("blocks_or_sliding", "blocks_or_either_way", "one_block", "one_block_local", "no_block"),
    *("blocks_alone", "always", "either_way", "scattered_blocks", "one_block_or_sliding"),
)
DENSE = ("packed_chunked", "either", "custom", "scattered_blocks", "one_block_or_sliding")
"""Functions without a structure that a `Mask` has."""
SIZES = ((11, 11, 0, 0), (5, 11, 6, 0), (5, 9, 6, 2), (4, 14, 3, 0), (1, 11, 10, 0), (1, 7, 10, 4))
"""M, N and the first positions: whole sequences, cached keys, a sliding cache, a static cache, with
more keys than tokens, and single queries."""


def call(function: Callable[..., Any], M: int, N: int, **more: Any) -> tuple[Tensor, Tensor]:
    """Returns our mask and that of "eager"."""
    arguments: dict[str, Any] = {"batch_size": 3, "q_length": M, "kv_length": N}
    arguments |= {"mask_function": function} | more
    expected: Tensor = masking_utils().eager_mask(**arguments)
    return create_mask(**arguments), expected


@pytest.mark.parametrize("kind_of_padding", PADDINGS)
@pytest.mark.parametrize("offset_as", [int, torch.tensor])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (name, sizes)
        for name in NAMES
        for sizes in SIZES
        # transformers finds packed documents in whole sequences only
        if sizes == SIZES[0] or not name.startswith(("packed", "blocks_alone"))
    ],
)
def test_values_are_those_of_eager(
    name: str, offset_as: Callable[[int], Any], sizes: tuple[int, ...], kind_of_padding: str
) -> None:
    M, N, q_offset, kv_offset = sizes
    more = {"q_offset": offset_as(q_offset), "kv_offset": kv_offset}
    visible = bool_padding(kind_of_padding)
    ours, expected = call(mask_functions()[name], M, N, attention_mask=visible, **more)
    assert isinstance(ours, LazyMask)
    is_dense = any(isinstance(one, Dense) for one in ours.mask.constraints)
    assert is_dense == (name in DENSE)
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(ours.clone(), expected)


@pytest.mark.parametrize(
    ("name", "more", "kinds"),
    [
        ("causal", {}, {Window}),
        ("sliding", {}, {Window}),
        ("sliding_both_ways", {}, {Window}),
        ("causal", {"attention_mask": "right"}, {Window, KeyRange}),
        ("causal", {"attention_mask": "left"}, {Window, KeyRange}),
        ("bidirectional", {"attention_mask": "right"}, {KeyRange}),
        ("bidirectional", {"attention_mask": "gaps"}, {KeyRange, Segments}),
        ("bidirectional", {"attention_mask": "all"}, set()),
        ("chunked", {}, {Window, Segments}),
        ("packed", {}, {Window, Segments}),
        ("causal", {"q_offset": 4, "q_length": 7}, {Window}),
        ("blocks", {}, {Intervals}),
        ("blocks_local", {"attention_mask": "left"}, {Window, Intervals, KeyRange}),
        ("one_block", {}, {Intervals}),
        ("no_block", {}, {Window}),
        ("always", {}, set()),
        ("either_way", {}, {Window}),
        ("blocks", {"q_offset": torch.tensor(7), "q_length": 1}, {KeyRange}),
        ("causal", {"q_offset": torch.tensor(10), "q_length": 1}, {KeyRange}),
    ],
)
def test_structure_is_kept(name: str, more: dict[str, Any], kinds: set[type[Any]]) -> None:
    arguments = {"q_length": 11, "kv_length": 11} | more
    arguments["attention_mask"] = bool_padding(more.get("attention_mask", "none"))
    ours = create_mask(3, mask_function=mask_functions()[name], **arguments)
    assert isinstance(ours, LazyMask)
    assert {type(one) for one in ours.mask.constraints} == kinds


def test_offsets_on_another_device_are_not_read() -> None:
    """The host does not wait for a GPU: positions stay tensors."""
    mask = create_mask(
        2, 5, 11, q_offset=torch.empty((), dtype=torch.int64, device="meta"), device="meta"
    )
    assert isinstance(mask, LazyMask)
    assert [type(one) for one in mask.mask.constraints] == [Positions]


def test_a_mask_without_hidden_keys_is_a_mask() -> None:
    """Never None, whose meaning depends on the module."""
    for function in ("causal", "bidirectional"):
        for M in (1, 11):
            skips = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": True}
            ours, _ = call(mask_functions()[function], M, 11, q_offset=11 - M, **skips)
            assert isinstance(ours, LazyMask)


def test_default_is_causal() -> None:
    mask = create_mask(1, 3, 4)
    assert (mask == 0)[0, 0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]


def lazy(mask: Mask, device: str = "cpu") -> LazyMask:
    return LazyMask(mask, (2, 5, 7), torch.device(device), may_be_packed=True)


def test_lazy_mask_is_an_additive_tensor() -> None:
    """To a model with attention of its own it is the tensor that "eager" adds to the scores."""
    mask = Mask.causal() & Mask.padding(torch.tensor([7, 2]))
    ours, values = lazy(mask), additive(mask.materialize(2, 1, 5, 7), torch.float32)
    assert (ours.shape, ours.dtype, ours.device.type) == (values.shape, torch.float32, "cpu")
    assert torch.equal(ours[:, :, 2:, ::2], values[:, :, 2:, ::2])
    assert torch.equal(torch.ones(2, 3, 5, 7) + ours, torch.ones(2, 3, 5, 7) + values)
    assert torch.equal(ours == 0, values == 0)
    assert torch.equal(torch.cat([ours, values]), torch.cat([values, values]))
    assert type(ours + 1) is Tensor
    assert "KeyRange" in repr(ours)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.masked_fill_(torch.arange(7) == 2, -1e9),
        lambda mask: mask[:, :, 1:, :4].fill_(0.0),
        lambda mask: mask[0].zero_(),
    ],
)
def test_lazy_mask_may_be_changed_in_place(
    change: Callable[[Tensor], Tensor], inference: bool
) -> None:
    """Also through a slice; the attention function then takes the values."""
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    with torch.inference_mode(inference):
        ours = lazy(Mask.causal())
        values = ours.clone()
        before = ours.is_changed
        for mask in (ours, values):
            change(mask)
        assert (before, ours.is_changed) == (False, True)
        assert torch.equal(ours.clone(), values)
        expected, _ = attention_forward(torch.nn.Module(), q, k, k, values)
        for same in (ours, ours.to(torch.float64), ours.detach()):
            found, _ = attention_forward(torch.nn.Module(), q, k, k, same)
            assert torch.equal(found, expected)


def test_lazy_mask_keeps_its_structure() -> None:
    ours = lazy(Mask.padding(torch.tensor([7, 2])))
    assert ours.contiguous() is ours
    assert ours.to("cpu") is ours
    moved = ours.to("meta")
    assert isinstance(moved, LazyMask)
    for same in (ours.detach(), moved):
        assert isinstance(same, LazyMask)
        assert same.may_be_packed
        assert [type(one) for one in same.mask.constraints] == [KeyRange]
    half = ours.to(torch.bfloat16)
    assert isinstance(half, LazyMask)
    assert (half.dtype, half[0].dtype) == (torch.bfloat16, torch.bfloat16)
    assert type(ours.bool()) is Tensor
    assert moved.device.type == moved.mask.tensors()[0][1].device.type == "meta"


def test_a_function_that_changes_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another definition, another variable and another name: the mask is dense, and right."""
    library = masking_utils()

    def closed(sliding_window: int) -> Callable[..., Any]:
        return lambda b, h, q, k: k >= q - sliding_window

    def renamed(width: int) -> Callable[..., Any]:
        return lambda b, h, q, k: k > q - width

    for changed in (closed, renamed, None):
        with monkeypatch.context() as patched:
            if changed is None:
                patched.delattr(library, "sliding_window_overlay")
                function = library.and_masks(library.causal_mask_function, renamed(4))
            else:
                patched.setattr(library, "sliding_window_overlay", changed)
                function = library.sliding_window_causal_mask_function(4)
            structure.recognised.cache_clear()
            ours, expected = call(function, 11, 11)
            assert isinstance(ours, LazyMask)
            assert type(ours.mask.constraints[0]) is Dense
            assert torch.equal(ours.clone(), expected)
            causal = call(library.causal_mask_function, 5, 11)[0]
            assert isinstance(causal, LazyMask)
            assert type(causal.mask.constraints[0]) is Window
    structure.recognised.cache_clear()
