"""The layer of Gated DeltaNet, in linear time: a state of constant size that corrects itself.

    q, k, v = silu(conv(x W_qkv))          a short causal convolution of every channel
    g       = -exp(A) softplus(x W_a + b)  log_decay of each value head
    beta    = sigmoid(x W_b)
    o       = gated_delta_rule(q, k, v, g, beta), with q and k of length 1
    y       = W_o (RMSNorm(o) * silu(x W_z))

Source: Gated Delta Networks (Yang et al., 2024, arXiv:2412.06464).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from ..functional.causal_conv1d import causal_conv1d
from ..functional.delta_rule import gated_delta_rule, gated_delta_rule_step
from ..linear.convolution import WIDTHS
from .attention import AttentionLayer, size_of_heads, split_heads
from .linear_attention import LinearImplementation
from .options import AttnImplementation, check_positive

_LARGEST_RATE = 16.0
"""exp(A) starts between 0 and this number."""

_TIME_STEPS = (1e-3, 1e-1)
"""Range of softplus(b) at the start. A head then keeps exp(-1.6) to nearly all of its state for
each token."""


class DeltaState(NamedTuple):
    """State of `GatedDeltaRuleAttention`: all that later tokens need to know about earlier ones."""

    S: Tensor
    """(B, heads, head_size, head_size), float32, or float64 for a layer in float64"""
    inputs: Tensor
    """(B, channels, kernel_size - 1): the last inputs of the convolution"""


class GatedDeltaRuleAttention(AttentionLayer):
    """Layer of Gated DeltaNet, in the place of a self-attention layer.

    Args:
        width: size of the input and output vectors.
        heads: number of value heads.
        key_heads: number of heads of queries and keys, which divides `heads`; `heads` unless given.
        head_size: size of a head of queries, keys and values; width / heads unless given.
        kernel_size: number of tokens that the convolution sees, from 2 to 8.
        attn_implementation: "eager" (plain torch) or "fused" (these kernels).

    Raises:
        ValueError: an option is out of range or not one of its choices.
    """

    implementations: ClassVar[Any] = LinearImplementation

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_heads: int | None = None,
        head_size: int | None = None,
        kernel_size: int = 4,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        size = size_of_heads(width, heads) if head_size is None else head_size
        super().__init__(width, heads, size, attn_implementation=attn_implementation)
        self.key_heads = heads if key_heads is None else key_heads
        check_positive("key_heads", self.key_heads)
        if heads % self.key_heads:
            raise ValueError(f"key_heads must divide heads, got {self.key_heads} and {heads}")
        if kernel_size not in WIDTHS:
            raise ValueError(
                f"kernel_size must be from {WIDTHS[0]} to {WIDTHS[-1]}, got {kernel_size!r}"
            )
        self._sizes = [self.key_heads * size, self.key_heads * size, heads * size]
        channels, inner = sum(self._sizes), heads * size
        self.queries_keys_values = nn.Linear(width, channels, bias=False)
        self.output_gate = nn.Linear(width, inner, bias=False)
        self.decay = nn.Linear(width, heads, bias=False)
        self.beta = nn.Linear(width, heads, bias=False)
        self.kernel = nn.Parameter(torch.empty(channels, kernel_size))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.time_bias = nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(size, eps=1e-6)
        self.out_proj = nn.Linear(inner, width, bias=False)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Draws the convolution, the rates and the time steps as in the source."""
        bound = self.kernel.shape[1] ** -0.5
        nn.init.uniform_(self.kernel, -bound, bound)
        with torch.no_grad():
            self.log_rate.uniform_(0.0, _LARGEST_RATE).clamp_(min=1e-3).log_()
            step = self.time_bias.uniform_(*map(math.log, _TIME_STEPS)).exp()
            self.time_bias.copy_(step + (-torch.expm1(-step)).log())  # inverse of softplus

    def new_state(self, batch: int) -> DeltaState:
        """Returns the state before the first token: zeros."""
        weight, size = self.kernel, self.head_size
        dtype = torch.promote_types(weight.dtype, torch.float32)
        S = weight.new_zeros(batch, self.heads, size, size, dtype=dtype)
        return DeltaState(S, weight.new_zeros(batch, weight.shape[0], weight.shape[1] - 1))

    def forward(self, x: Tensor, *, state: DeltaState | None = None) -> Tensor:
        """Runs the layer.

        Args:
            x: inputs (B, T, width).
            state: state after the tokens before x, from `new_state` at first. It is updated in
                place, and autograd does not apply to what depends on it.

        Returns:
            (B, T, width); row t depends on the state and rows 0 to t only.

        Raises:
            TypeError, ValueError: an argument is invalid for `gated_delta_rule`.
        """
        rate, step = (
            self.log_rate.exp(),
            softplus(self.decay(x).to(self.time_bias) + self.time_bias),
        )
        gates = (-rate * step).mT, self.beta(x).sigmoid().to(self.time_bias).mT
        if state is None:
            o = self._delta_rule(x, gates, None)
        else:
            with torch.no_grad():
                o = self._delta_rule(x, gates, state)
        gate = split_heads(self.output_gate(x), self.heads)
        return self._out_proj(self.norm(o.to(self.norm.weight)) * silu(gate))

    def _delta_rule(
        self, x: Tensor, gates: tuple[Tensor, Tensor], state: DeltaState | None
    ) -> Tensor:
        """o (B, heads, T, head_size) of x (B, T, width), and the new state in the place of the old
        one; the gates are log_decay and beta, (B, heads, T) each."""
        backend = "reference" if self.attn_implementation == "eager" else "auto"
        channels = self.queries_keys_values(x)
        channels, inputs = causal_conv1d(
            channels.mT, self.kernel,
            activation="silu", initial_state=None if state is None else state.inputs.to(channels),
            return_state=True, backend=backend,
        )  # fmt: skip
        heads = (self.key_heads, self.key_heads, self.heads)
        parts = channels.mT.split(self._sizes, dim=-1)
        q, k, v = (split_heads(part, count) for part, count in zip(parts, heads, strict=True))
        if state is None:
            return gated_delta_rule(q, k, v, *gates, l2norm=True, backend=backend)
        state.inputs.copy_(inputs)
        if x.shape[1] == 1:
            return gated_delta_rule_step(q, k, v, *gates, state.S, l2norm=True, backend=backend)
        o, S = gated_delta_rule(
            q, k, v, *gates,
            l2norm=True, initial_state=state.S, return_state=True, backend=backend,
        )  # fmt: skip
        state.S.copy_(S)
        return o
