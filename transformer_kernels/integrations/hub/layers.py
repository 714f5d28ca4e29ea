"""Layers for `kernels.kernelize`, by the names of transformers' mapping: the functions that linear
layers of its models call.

A layer has no state: `kernelize` calls `forward` with another module as self.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..huggingface import linear_functions
from ..huggingface.linear_functions import Call

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "recurrent_gated_delta_rule",
]


def _call(tokens: int, options: dict[str, Any]) -> Call:
    """The call of a layer. Its options may have the boundaries of packed documents."""
    documents = options.get("cu_seqlens")
    if documents is None:
        documents = options.get("cu_seq_lens_q")
    if documents is None and options.get("seq_idx") is not None:
        raise ValueError("seq_idx needs the boundaries of the packed documents too: cu_seq_lens_q")
    return Call(tokens, documents)


def _result(y: Any, weight: Tensor) -> Tensor:
    if y is NotImplemented:
        raise ValueError(
            "the convolution takes 2 to 8 weights for each channel, and steps of one token in the "
            f"dtype of their state; weight has shape {tuple(weight.shape)} and {weight.dtype}"
        )
    result: Tensor = y
    return result


class chunk_gated_delta_rule(nn.Module):  # noqa: N801
    """The gated delta rule, and KDA: "chunk_kda"."""

    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        call = _call(query.shape[1], options)
        return linear_functions.delta_rule(
            call, query, key, value, g, beta, chunk_size,
            initial_state, output_final_state, use_qk_l2norm_in_kernel,
        )  # fmt: skip


class recurrent_gated_delta_rule(nn.Module):  # noqa: N801
    """The same for one token: "fused_recurrent_gated_delta_rule" and "fused_recurrent_kda"."""

    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        call = _call(query.shape[1], options)
        return linear_functions.delta_rule(
            call, query, key, value, g, beta, 1,
            initial_state, output_final_state, use_qk_l2norm_in_kernel,
        )  # fmt: skip


class causal_conv1d_fn(nn.Module):  # noqa: N801
    """The convolution before them."""

    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Tensor:
        call = _call(hidden_states.shape[-1], options)
        y = linear_functions.convolution(call, hidden_states, weight, bias, activation)
        return _result(y, weight)


class causal_conv1d_update(nn.Module):  # noqa: N801
    """The convolution of one token."""

    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        y = linear_functions.convolution_step(
            Call(1, None), hidden_states, conv_state, weight, bias, activation
        )
        return _result(y, weight)
