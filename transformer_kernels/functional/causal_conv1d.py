"""The depthwise causal convolution of hybrid models: of whole sequences, and of the next tokens."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from ..common.argument_checks import check_bool
from ..common.overrides import is_overridden, overridden
from ..dispatch.division import check_undivided
from ..linear.convolution import (
    CONV_BACKENDS,
    Results,
    check_activation,
    conv_problem,
    step_problem,
)
from ..linear.run import run, run_steps
from .signatures import ConvOptions


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[ConvOptions],
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    return_state: Literal[True],
    **options: Unpack[ConvOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    return_state: bool,
    **options: Unpack[ConvOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes a depthwise causal convolution, as hybrid models do before their linear layers.

    y_t = activation(bias + sum over w of weight[:, w] x_{t - (W - 1) + w}), where the inputs before
    the first token are those of `initial_state`. Sums are float32 (float64 for float64 inputs). The
    results are differentiable in every floating-point tensor argument, to any order.

    Args:
        x: (B, C, T) in float16, bfloat16, float32 or float64. Any strides, without a copy: channels
            first, or channels last as a view `(B, T, C).transpose(1, 2)`.
        weight: (C, W) with W from 2 to 8, in x's dtype or float32.
        bias: (C,) in weight's dtype; default: zeros.
        activation: None, "silu" or "swish"; the last two are the same.
        initial_state: the W - 1 inputs before x, (B, C, W - 1) in x's dtype, with cu_seqlens those
            of each sequence; any strides. Default: zeros.
        return_state: also returns the last W - 1 inputs, for `initial_state` of a later call or for
            `causal_conv1d_step`.
        cu_seqlens: offsets of packed sequences, (sequences + 1,) in int32 or int64: sequence b has
            the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1 of x, which then has B = 1. Sequences
            do not see each other. Tokens after the last one may hold NaN; their y is 0.
        backend: "auto", "cpu" or "reference". A named backend never falls back to another one.

    Returns:
        y (B, C, T) in x's dtype; with `return_state`, the pair (y, state), the state (B, C, W - 1)
        in x's dtype, with cu_seqlens one for each sequence.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or the named backend does not
            support the call.

    Source: docs/delta.md; Gu and Dao 2023, arXiv:2312.00752.
    """
    if is_overridden(x, weight, bias):
        return overridden(
            causal_conv1d, x, weight, bias, activation=activation, initial_state=initial_state,
            return_state=return_state, cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip
    check_undivided("causal_conv1d")
    check_bool("return_state", return_state)
    options = check_activation(activation)
    problem = conv_problem(x, weight, bias, options, state=initial_state, cu_seqlens=cu_seqlens)
    results: Results = run(problem, backend, CONV_BACKENDS)
    return (results.y, results.state) if return_state else results.y


def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes `causal_conv1d` of the next tokens of each sequence and updates the state.

    The result equals that of `causal_conv1d` with `initial_state=state`; the final state overwrites
    `state`. For inference: no argument may require grad in grad mode.

    Args:
        x: the next token (B, C), or M tokens (B, C, M), in float16, bfloat16, float32 or float64;
            any strides.
        weight: as for `causal_conv1d`.
        bias: (C,) in weight's dtype, or None.
        state: the last W - 1 inputs (B, C, W - 1) in x's dtype; any strides that do not repeat
            elements. Zeros before the first token.
        activation: as for `causal_conv1d`.
        backend: "auto", "cpu" or "reference". A named backend never falls back to another one.

    Returns:
        y, of x's shape and dtype.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, a tensor requires grad in grad
            mode, or the named backend does not support the call.

    Source: docs/delta.md.
    """
    if is_overridden(x, weight, bias, state):
        return overridden(
            causal_conv1d_step, x, weight, bias, state, activation=activation, backend=backend
        )
    check_undivided("causal_conv1d_step")
    problem = step_problem(x, weight, bias, check_activation(activation), state=state)
    return run_steps(problem, backend, CONV_BACKENDS).view(x.shape)
