"""Layers of the Reformer: attention by hashing, reversible blocks, and their stack.

The backward pass of a reversible stack recomputes each block's inputs from its outputs:

    y1 = x1 + f(x2),   y2 = x2 + g(y1)            so that   x2 = y2 - g(y1),   x1 = y1 - f(x2)

Only the outputs of the last block are saved, however many blocks there are.

Source: Reformer: The Efficient Transformer (Kitaev et al., 2020, arXiv:2001.04451), whose section 3
has the layers of The Reversible Residual Network (Gomez et al., 2017, arXiv:1707.04585).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states

from ..masks.mask import Mask
from .attention import AttentionLayer, MultiHeadAttention, size_of_heads
from .blocks import FeedForward
from .lsh_attention import (
    check_buckets,
    default_buckets,
    hash_buckets,
    lsh_attention,
    sorted_by_bucket,
)
from .options import AttnImplementation, check_positive

Choices = tuple[Tensor, ...]
"""Discrete decisions of a branch, such as an order: tensors without a gradient"""

Gradients = dict[nn.Parameter, Tensor]


class LSHAttention(AttentionLayer):
    """Multi-head self-attention whose queries see the keys with their hash; see `lsh_attention`.

    One projection serves queries and keys. Linear layers have no biases, and attention
    probabilities no dropout.

    Args:
        width: size of the input and output vectors.
        heads: number of heads; divides `width`.
        chunk: number of tokens of a chunk.
        causal: True if a query sees earlier positions only.
        buckets: number of buckets, as even factors; `default_buckets` of the length unless given.
        scale: see `lsh_attention`.
        attn_implementation: "eager", "fused" or "sdpa"; see `lsh_attention`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        chunk: int,
        causal: bool = True,
        buckets: tuple[int, ...] | None = None,
        scale: float | None = None,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        size = size_of_heads(width, heads)
        super().__init__(width, heads, size, attn_implementation=attn_implementation)
        check_positive("chunk", chunk)
        if buckets is not None:
            check_buckets(buckets)
        self.chunk = chunk
        self.causal = causal
        self.buckets = buckets
        self.scale = scale
        self.queries = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        order: Tensor | None = None,
        *,
        rounds: int,
        generator: torch.Generator | None = None,
        key_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention from x to itself.

        Args:
            x: inputs (B, T, width).
            order: positions sorted by hash, (B, heads, rounds, T) integers; None to hash.
            rounds: number of hash rounds. More rounds come closer to full attention.
            generator: random generator of the hashes, on the CPU; torch's default generator unless
                given.
            key_lengths: integers (B,): tokens at and after the length are padding.

        Returns:
            (B, T, width), and the order.
        """
        q, v = self._to_heads(x, self.queries, self.values)
        if order is None:
            order = self._order(q, rounds, generator, key_lengths)
        o = lsh_attention(
            q, v, order,
            chunk=self.chunk, causal=self.causal, scale=self.scale, key_lengths=key_lengths,
            attn_implementation=self.attn_implementation,
        )  # fmt: skip
        return self._out_proj(o), order

    def _order(
        self,
        q: Tensor,
        rounds: int,
        generator: torch.Generator | None,
        key_lengths: Tensor | None,
    ) -> Tensor:
        factors = self.buckets or default_buckets(q.shape[2], self.chunk)
        buckets = hash_buckets(q, rounds=rounds, buckets=factors, generator=generator)
        if key_lengths is not None:  # padding is sorted to the end
            position = torch.arange(q.shape[2], device=q.device)
            is_padding = position >= key_lengths[:, None, None, None]
            buckets = buckets.masked_fill(is_padding, math.prod(factors))
        return sorted_by_bucket(buckets)


class ReversibleBlock(nn.Module, ABC):
    """Two residual branches without residual connections of their own."""

    @abstractmethod
    def f(
        self, x: Tensor, choices: Choices | None = None, **options: Any
    ) -> tuple[Tensor, Choices]:
        """First branch.

        Args:
            x: inputs (B, T, width).
            choices: those of an earlier call, to repeat; None to decide anew. Recomputed inputs
                differ by rounding, which could turn a decision.
            options: the options given to the stack.

        Returns:
            (B, T, width), and the choices. Random numbers for a choice must not come from torch's
            default generators: a repeated call does not draw them, and would shift the dropout.
        """

    @abstractmethod
    def g(self, x: Tensor) -> Tensor:
        """Second branch: x (B, T, width) -> the same shape."""

    def forward(self, branch: Literal["f", "g"], *inputs: Any, **options: Any) -> Any:
        """Runs a branch; the stack calls blocks by this method, which runs their hooks."""
        return getattr(self, branch)(*inputs, **options)


class _TransformerBlock(ReversibleBlock):
    """Base of the blocks: g is a feed-forward network, behind a normalisation as f is."""

    def __init__(
        self, width: int, *, hidden: int | None = None, dropout: float = 0.0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.feed_forward = FeedForward(width, hidden=hidden)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def g(self, x: Tensor) -> Tensor:
        """Feed-forward network: x (B, T, width) -> the same shape."""
        y: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return y


class ReformerBlock(_TransformerBlock):
    """Reversible block: f is attention by hashing, g a feed-forward network.

    Options are those of `SelfAttentionBlock`, and those of `LSHAttention` in `attention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
        eps: float = 1e-5,
        **attention: Any,
    ) -> None:
        super().__init__(width, hidden=hidden, dropout=dropout, eps=eps)
        self.attention = LSHAttention(width, heads, **attention)

    def f(  # type: ignore[override]
        self,
        x: Tensor,
        choices: Choices | None = None,
        *,
        rounds: int,
        generator: torch.Generator,
        key_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Choices]:
        """Attention, whose choice is the order; see `LSHAttention.forward`.

        Hashes have a generator of their own, so that dropout is the same with and without hashing.
        """
        y, order = self.attention(
            self.attention_norm(x), None if choices is None else choices[0],
            rounds=rounds, generator=generator, key_lengths=key_lengths,
        )  # fmt: skip
        return self.dropout(y), (order,)


class LocalBlock(_TransformerBlock):
    """Reversible block: f is causal attention to a window of keys, g a feed-forward network.

    Options are those of `TransformerBlock`, and `window`, the number of visible keys, the query's
    own included.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        window: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        eps: float = 1e-5,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__(width, hidden=hidden, dropout=dropout, eps=eps)
        check_positive("window", window)
        self.window = window
        self.attention = MultiHeadAttention(width, heads, attn_implementation=attn_implementation)

    def f(
        self, x: Tensor, choices: Choices | None = None, **options: Any
    ) -> tuple[Tensor, Choices]:
        """Attention; it has no choices, and no use for the options of `ReformerBlock.f`."""
        y = self.attention(self.attention_norm(x), mask=Mask.window(self.window - 1, 0))
        return self.dropout(y), ()


class ReversibleStack(nn.ModuleList):
    """Sequence of reversible blocks, run as one autograd function.

    The backward pass takes one more forward pass, repeats the dropout and the choices of the first
    one, and computes first derivatives only. Residual sums have the dtype of the inputs, also under
    autocast. If `reversible` is False, autograd saves what each block needs.
    """

    reversible = True

    def forward(self, x1: Tensor, x2: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """x1, x2 (B, T, width) -> the same shapes; `options` are passed to each block's `f`."""
        if self.reversible and torch.is_grad_enabled():
            parameters = [p for p in self.parameters() if p.requires_grad]
            y: tuple[Tensor, Tensor] = _Reversible.apply(  # type: ignore[no-untyped-call]
                list(self), options, x1, x2, *parameters
            )
            return y
        for block in self:
            x1 = x1 + block("f", x2, **options)[0]
            x2 = x2 + block("g", x1)
        return x1, x2


_RandomState = tuple[Tensor, list[int], list[Tensor]]
"""States of torch's default generators: of the CPU's, and of those of other devices by index"""


class _Record(NamedTuple):
    """State that the recomputation of a block starts from, besides its outputs."""

    choices: Choices
    before_f: _RandomState
    before_g: _RandomState


class _Reversible(torch.autograd.Function):
    """A stack as one function. The parameters are inputs, so that `torch.autograd.grad`, hooks and
    DistributedDataParallel receive their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[ReversibleBlock],
        options: dict[str, Any],
        x1: Tensor,
        x2: Tensor,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor]:
        records = []
        for block in blocks:
            before_f = _random_state(x1)
            y, choices = block("f", x2, **options)
            x1 = x1 + y
            before_g = _random_state(x1)
            x2 = x2 + block("g", x1)
            records.append(_Record(choices, before_f, before_g))
        ctx.save_for_backward(x1, x2)
        ctx.blocks, ctx.options, ctx.parameters = blocks, options, parameters
        ctx.records, ctx.autocast = records, _autocast_settings(x1.device)
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy1: Tensor, dy2: Tensor) -> tuple[Any, ...]:
        y1, y2 = ctx.saved_tensors
        gradients: Gradients = {}
        for block, record in zip(reversed(ctx.blocks), reversed(ctx.records), strict=True):
            recomputed = partial(_recomputed, ctx, block, gradients)
            y, dx = recomputed(record.before_g, dy2, "g", y1)
            y2, dy1 = y2 - y, dy1 + dx
            y, dx = recomputed(record.before_f, dy1, "f", y2, record.choices)
            y1, dy2 = y1 - y, dy2 + dx
        return None, None, dy1, dy2, *map(gradients.get, ctx.parameters)


def _recomputed(
    ctx: Any,
    block: ReversibleBlock,
    gradients: Gradients,
    state: _RandomState,
    dy: Tensor,
    branch: Literal["f", "g"],
    x: Tensor,
    *choices: Choices,
) -> tuple[Tensor, Tensor]:
    """A branch at x, and the gradient of x for the gradient dy of the result.

    Adds the gradients of the block's parameters to `gradients`.
    """
    x = x.detach().requires_grad_()
    parameters = {n: p for n, p in block.named_parameters() if p.requires_grad}
    # Hooks of a parameter belong to its whole gradient, so that the block runs with aliases.
    aliases = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    options = ctx.options if branch == "f" else {}
    with torch.enable_grad(), torch.autocast(**ctx.autocast), _random_numbers(state, x.device):
        y = functional_call(block, aliases, (branch, x, *choices), options)
    y = y[0] if branch == "f" else y
    dx, *found = torch.autograd.grad(y, (x, *aliases.values()), dy.to(y.dtype), allow_unused=True)
    for parameter, gradient in zip(parameters.values(), found, strict=True):
        if gradient is not None:
            before = gradients.get(parameter)
            gradients[parameter] = gradient if before is None else before + gradient
    return y.detach(), torch.zeros_like(x) if dx is None else dx


def _autocast_settings(device: torch.device) -> dict[str, Any]:
    """Arguments of an autocast context like the current one."""
    return {
        "device_type": device.type,
        "enabled": torch.is_autocast_enabled(device.type),
        "dtype": torch.get_autocast_dtype(device.type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _random_state(x: Tensor) -> _RandomState:
    """States now, for the CPU and the device of x."""
    return torch.get_rng_state(), *get_device_states(x)


@contextmanager
def _random_numbers(state: _RandomState, device: torch.device) -> Iterator[None]:
    """Context in which the default generators continue from a state; they are restored after it."""
    cpu, devices, states = state
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.set_rng_state(cpu)
        set_device_states(devices, states, device_type=device.type)
        yield
