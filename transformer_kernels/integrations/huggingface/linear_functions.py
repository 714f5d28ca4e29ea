"""The functions that linear layers of transformers call, on our operators.

Each takes what `transformers` calls its fallback with, tokens before heads, after the `Call`. It
returns NotImplemented for a call that our operators do not take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...functional.causal_conv1d import causal_conv1d, causal_conv1d_step
from ...functional.delta_rule import (
    gated_delta_rule,
    gated_delta_rule_step,
    gated_delta_rule_varlen,
)
from ...functional.linear_attention import linear_attention
from ...functional.linear_varlen import linear_attention_varlen
from ...linear.types import LinearState

_IDENTITY: Any = {"feature_map": "identity", "normalize": False}


class Call(NamedTuple):
    """A call of a linear layer."""

    tokens: int
    """T, of each row."""
    documents: Tensor | None
    """int32 (documents + 1): boundaries in the B T tokens, rows one after the other. None: each row
    is one document."""

    def pack(self, x: Tensor) -> Tensor:
        """Returns (B T, ...) of (B, T, ...)."""
        return x.flatten(0, 1)

    def states(self, rows: Tensor | None) -> Tensor | None:
        """Returns the state of each document before its first token: that of its row, or zeros.

        Args:
            rows: (B, ...), or None for zeros.
        """
        if rows is None:
            return None
        states = rows.new_zeros(self._documents.shape[0] - 1, *rows.shape[1:])
        return states.index_copy(0, self._at(rows.shape[0], 0), rows)

    def last(self, states: Tensor, B: int) -> Tensor:
        """Returns the state of the last document of each row."""
        return states[self._at(B, self.tokens - 1)]

    def shifted(self, extra: int) -> Tensor:
        """Returns the boundaries in rows with `extra` tokens of the first document before each."""
        documents = self._documents
        return documents + extra * ((documents + self.tokens - 1) // self.tokens)

    @property
    def _documents(self) -> Tensor:
        assert self.documents is not None
        return self.documents

    def _at(self, B: int, token: int) -> Tensor:
        """Returns the index of the document that has a token, in each row."""
        documents = self._documents
        tokens = torch.arange(B, device=documents.device, dtype=documents.dtype) * self.tokens
        index = torch.searchsorted(documents, tokens + token, right=True) - 1
        return index.clamp(max=documents.shape[0] - 2)  # of padding after the last document


def _wide(x: Tensor) -> torch.dtype:
    """Returns the dtype of states: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def delta_rule(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule, or KDA for g of each channel.

    Args:
        call: the call of the layer.
        query: (B, T, H_k, D).
        key: (B, T, H_k, D).
        value: (B, T, H_v, D_v).
        g: log-decay (B, T, H_v) or (B, T, H_v, D).
        beta: (B, T, H_v).
        chunk_size: has no effect.
        initial_state: (B, H_v, D, D_v). A single token without gradients overwrites it.
        output_final_state: also returns the state after the last token, else None.
        use_qk_l2norm_in_kernel: normalises q and k.
        rest: has no effect.
    """
    wide = _wide(query)
    state = None if initial_state is None else initial_state.to(wide)
    x = query, key.to(query.dtype), value.to(query.dtype), g.to(wide), beta.to(wide)
    options: dict[str, Any] = {"l2norm": use_qk_l2norm_in_kernel}
    if call.documents is not None:
        q, k, v, log_decay, beta = map(call.pack, x)
        o, states = gated_delta_rule_varlen(
            q, k, v, log_decay, beta, call.documents,
            initial_state=call.states(state), return_state=True, **options,
        )  # fmt: skip
        last = call.last(states, query.shape[0]) if output_final_state else None
        return o.unflatten(0, query.shape[:2]), last
    q, k, v, log_decay, beta = (part.transpose(1, 2) for part in x)
    if state is not None and query.shape[1] == 1 and not torch.is_grad_enabled():
        state = state.contiguous()
        o = gated_delta_rule_step(q, k, v, log_decay, beta, state, **options)
    else:
        o, state = gated_delta_rule(
            q, k, v, log_decay, beta, initial_state=state, return_state=True, **options
        )
    return o.transpose(1, 2), state if output_final_state else None


def convolution(
    call: Call,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> Any:
    """Computes the causal convolution of (B, C, N); N - T tokens precede those of the layer."""
    if not 2 <= weight.shape[1] <= 8:
        return NotImplemented
    fused, after = _activations(activation)
    x = _in_dtype_of(weight, hidden_states)
    if call.documents is None:
        y = causal_conv1d(x, weight, bias, activation=fused)
    else:
        B, C, N = x.shape
        rows = x.transpose(1, 2).reshape(1, B * N, C).transpose(1, 2)
        documents = call.shifted(N - call.tokens)
        y = causal_conv1d(rows, weight, bias, activation=fused, cu_seqlens=documents)
        y = y.transpose(1, 2).reshape(B, N, C).transpose(1, 2)
    return after(y).to(hidden_states.dtype)


def convolution_step(
    call: Call,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Computes the convolution of (B, C, 1) after the inputs `conv_state`, which it shifts by one.

    Args:
        call: the call of the layer.
        hidden_states: (B, C, 1).
        conv_state: (B, C, at least W - 1).
        weight: (C, W).
        bias: (C,).
        activation: name of an activation of transformers.
    """
    spare = conv_state.shape[-1] - weight.shape[1] + 1
    dtypes = {hidden_states.dtype, conv_state.dtype, weight.dtype} - {torch.float32}
    is_one_token = hidden_states.shape[-1] == 1 and hidden_states.dtype == conv_state.dtype
    if not (2 <= weight.shape[1] <= 8 and is_one_token and len(dtypes) <= 1 and spare >= 0):
        return NotImplemented
    if torch.is_grad_enabled():
        inputs = torch.cat([conv_state, hidden_states], dim=-1)
        conv_state.copy_(inputs[..., 1:])
        return convolution(call, inputs, weight, bias, activation)[..., -1:]
    fused, after = _activations(activation)
    shifted = conv_state[..., 1 : spare + 1].clone()
    y = causal_conv1d_step(hidden_states, weight, bias, conv_state[..., spare:], activation=fused)
    conv_state[..., :spare] = shifted
    return after(y)


def _activations(name: str | None) -> tuple[str | None, Any]:
    """Returns the activation that the kernel computes, and the one after it."""
    from transformers.activations import ACT2FN

    if name in (None, "silu", "swish"):
        return name, nn.Identity()
    return None, ACT2FN[name]


def _in_dtype_of(weight: Tensor, x: Tensor) -> Tensor:
    """Returns x in a dtype that our operator takes with `weight`."""
    return x if weight.dtype in (x.dtype, torch.float32) else x.to(weight.dtype)


def fused_mamba(call: Call, *args: Any, **options: Any) -> None:
    """Returns None: the layer then calls the convolution and the scan."""


def scan(
    call: Call,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 64,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **rest: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the scan of Mamba-2: linear attention, whose values and decay the step sizes scale.

    Args:
        call: the call of the layer.
        hidden_states: (batch, T, H, P).
        dt: step sizes (batch, T, H).
        A: (H,), negative.
        B: keys (batch, T, groups, N).
        C: queries (batch, T, groups, N).
        chunk_size: has no effect.
        D: (H,) or (H, P): factor of hidden_states in the result.
        dt_bias: (H,), added to dt.
        initial_states: (batch, H, P, N).
        dt_softplus: applies softplus to dt.
        dt_limit: bounds of dt.
        return_final_states: also returns the states after the last token.
        z: gate (batch, T, H, P) of the result.
        rest: has no effect.
    """
    H = hidden_states.shape[2]
    dt = _step_sizes(dt, dt_bias, dt_softplus, _wide(hidden_states)).clamp(*dt_limit)
    v = (hidden_states * dt[..., None]).to(hidden_states.dtype)
    q, k = (_by_head(x, H).to(hidden_states.dtype) for x in (C, B))
    state = None if initial_states is None else initial_states.to(dt.dtype).transpose(-1, -2)
    o, state = linear_scan(call, q, k, v, A.to(dt.dtype) * dt, state)
    if D is not None:
        o = torch.addcmul(o, hidden_states, D if D.dim() == 2 else D[:, None]).to(o.dtype)
    if z is not None:
        o = o * functional.silu(z)
    return (o, state.transpose(-1, -2)) if return_final_states else o


def linear_scan(
    call: Call, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes linear attention without a feature map and without a denominator.

    Args:
        call: the call of the layer.
        q: (B, T, H, D).
        k: (B, T, H, D).
        v: (B, T, H, D_v).
        log_decay: (H,) or (B, T, H).
        state: (B, H, D, D_v), or None for zeros.

    Returns:
        o (B, T, H, D_v) and the state of each row after its last token.
    """
    of_tokens = log_decay.dim() == 3
    if call.documents is None:
        log_decay = log_decay.transpose(1, 2) if of_tokens else log_decay
        o, after = linear_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), log_decay=log_decay,
            initial_state=_linear_state(state), return_state=True, **_IDENTITY,
        )  # fmt: skip
        return o.transpose(1, 2), after.S
    o, after = linear_attention_varlen(
        call.pack(q), call.pack(k), call.pack(v), call.documents,
        log_decay=call.pack(log_decay) if of_tokens else log_decay,
        initial_state=_linear_state(call.states(state)), return_state=True, **_IDENTITY,
    )  # fmt: skip
    return o.unflatten(0, q.shape[:2]), call.last(after.S, q.shape[0])


def _linear_state(S: Tensor | None) -> LinearState | None:
    return None if S is None else LinearState(S, S.new_zeros(S.shape[:3]))


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool, dtype: torch.dtype) -> Tensor:
    dt = dt.to(dtype)
    if bias is not None:
        dt = dt + bias.to(dtype)
    return functional.softplus(dt) if softplus else dt


def _by_head(x: Tensor, H: int) -> Tensor:
    """Returns (..., H, N) of (..., groups, N); a view for a single group."""
    groups, N = x.shape[-2:]
    shape = (*x.shape[:-1], H // groups, N)
    return x[..., None, :].expand(shape).flatten(-3, -2)


def scan_step(
    call: Call,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """Computes `scan` of a single token; its state overwrites `state`.

    Args:
        call: the call of the layer.
        state: (batch, H, P, N).
        hidden_states: (batch, H, P).
        dt: (batch, H, P).
        A: (H, P, N).
        B: (batch, groups, N).
        C: (batch, groups, N).
        D: (H, P).
        dt_bias: (H, P).
        dt_softplus: as for `scan`.
        z: (batch, H, P).
        rest: has no effect.
    """
    H = hidden_states.shape[1]
    dt = _step_sizes(dt, dt_bias, dt_softplus, state.dtype)
    if A.stride(-1) == 0:  # one number for all N
        A = A[..., :1]
    decayed = state * torch.exp(dt[..., None] * A.to(state.dtype))
    k, q = (_by_head(x, H).to(state.dtype) for x in (B, C))
    after = torch.addcmul(decayed, (dt * hidden_states)[..., None], k[:, :, None])
    state.copy_(after)
    o = torch.matmul(after, q[..., None]).squeeze(-1)
    if D is not None:
        o = o + hidden_states * D
    if z is not None:
        o = o * functional.silu(z)
    return o.to(hidden_states.dtype)
