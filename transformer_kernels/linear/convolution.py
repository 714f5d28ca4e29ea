"""The depthwise causal convolution that hybrid models run before their linear layers: its tensors,
validation, definition in plain torch, operators and backends."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from ..backends.native import extension
from ..backends.schema import empty_like_layout
from ..common.argument_checks import FLOATS, check_tensor, shown, values_are_readable
from ..common.namespace import NAMESPACE
from ..common.storage import check_storage
from ..dispatch.autocast import cast_for_autocast
from ..problem import Shape
from ..problem.cache import check_no_gradient
from ..problem.types import accumulate_dtype
from ..problem.varlen import check_cu_seqlens, read_starts
from .backends import Backend, CpuBackend, ReferenceBackend
from .family import Family, FamilyProblem
from .registration import register_compiled

WIDTHS = range(2, 9)
"""Columns of the weight; as kMinConvWidth and kMaxConvWidth in csrc/common/conv_params.h."""


class Inputs(NamedTuple):
    """Tensors of a call, with any strides. `entries` is B; with cu_seqlens it is 1, and the entry
    holds the tokens of all sequences."""

    x: Annotated[Tensor, "(entries, C, T)", "passes steps"]
    weight: Annotated[Tensor, "(C, W)", "passes steps"]
    bias: Annotated[Tensor | None, "(C)", "passes steps"] = None
    """In the dtype of weight."""
    state: Annotated[Tensor | None, "(B, C, W - 1)", "passes steps"] = None
    """The last inputs before x, in its dtype; None is zero. Steps overwrite it."""
    cu_seqlens: Annotated[Tensor | None, "(B + 1)", "passes"] = None
    """int32, contiguous."""


class Options(NamedTuple):
    """Options of a call that are no tensors."""

    silu: Annotated[bool, "", "passes steps"] = False


class Results(NamedTuple):
    """Results of a forward pass."""

    y: Tensor
    """(entries, C, T) in x's dtype; zero after the last packed sequence."""
    state: Tensor
    """The last W - 1 inputs (B, C, W - 1), in x's dtype."""


class Cotangents(NamedTuple):
    """Gradients of the results; None is zero."""

    d_y: Annotated[Tensor, "(entries, C, T)", "backward"]
    dstate_end: Annotated[Tensor | None, "(B, C, W - 1)", "backward"]


class Gradients(NamedTuple):
    """Results of a backward pass; those of options that are not given are None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor | None


class ConvProblem(FamilyProblem):
    """One validated call: C channels as heads, T tokens as M and N, W as D and D_v."""

    @property
    def described(self) -> str:
        B, C, _, T, _, W, *_ = self.shape
        return f"x ({B}, {C}, {T})  weight ({C}, {W})"


def check_activation(activation: str | None) -> Options:
    """Returns the options of a call."""
    if activation is not None and activation not in ("silu", "swish"):
        raise ValueError(f"activation must be None, 'silu' or 'swish', got {shown(activation)}")
    return Options(silu=activation is not None)


def conv_problem(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    *,
    state: Tensor | None,
    cu_seqlens: Tensor | None = None,
    state_name: str = "initial_state",
) -> ConvProblem:
    """Validates a call of `causal_conv1d`; errors name the argument, its value and the rule."""
    check_tensor("x", x, FLOATS)
    if x.dim() != 3:
        raise ValueError(f"x must be (batch, channels, length), got shape {tuple(x.shape)}")
    check_storage((("x", x),))
    if state is not None:
        check_tensor(state_name, state, FLOATS)
        check_storage(((state_name, state),))
    x, _, state = cast_for_autocast(x, x, state)  # type: ignore[arg-type]
    B, C, T = x.shape
    check_tensor("weight", weight, tuple(dict.fromkeys((x.dtype, accumulate_dtype(x.dtype)))))
    if weight.dim() != 2 or weight.shape[0] != C or weight.shape[1] not in WIDTHS:
        raise ValueError(
            f"weight must be (C, W) with C = {C} and W from {WIDTHS[0]} to {WIDTHS[-1]}, "
            f"got shape {tuple(weight.shape)}"
        )
    if cu_seqlens is not None:
        cu_seqlens = _check_offsets(cu_seqlens, x)
        B = cu_seqlens.shape[0] - 1
    W = weight.shape[1]
    for name, tensor, dtype, sizes in (
        ("weight", weight, weight.dtype, (C, W)),
        ("bias", bias, weight.dtype, (C,)),
        (state_name, state, x.dtype, (B, C, W - 1)),
    ):
        if tensor is None:
            continue
        check_tensor(name, tensor, (dtype,))
        _check_device(name, tensor, x)
        if tensor.shape != sizes:
            raise ValueError(f"{name} must be {sizes}, got shape {tuple(tensor.shape)}")
        check_storage(((name, tensor),))
    shape = Shape(B, C, C, T, T, W, W, x.dtype, x.device)
    return ConvProblem(shape, Inputs(x, weight, bias, state, cu_seqlens), options)


def step_problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, *, state: Tensor
) -> ConvProblem:
    """Validates a call of `causal_conv1d_step`, like `conv_problem`."""
    check_tensor("x", x, FLOATS)
    if x.dim() not in (2, 3):
        raise ValueError(
            f"x must be (batch, channels) or (batch, channels, length), got shape {tuple(x.shape)}"
        )
    if not isinstance(state, Tensor):
        raise TypeError(f"state must be a tensor, got {type(state).__name__}")
    x = x if x.dim() == 3 else x[:, :, None]
    problem = conv_problem(x, weight, bias, options, state=state, state_name="state")
    if problem.inputs.state is not state:
        raise TypeError(
            f"state must have the dtype of x under autocast, {problem.shape.dtype}, "
            f"got {state.dtype}: it is overwritten in place"
        )
    if any(s == 0 and n > 1 for n, s in zip(state.shape, state.stride(), strict=True)):
        raise ValueError(
            f"state must not be expanded, because it is overwritten, got strides {state.stride()}"
        )
    tensors = {"x": x, "weight": weight, "bias": bias, "state": state}
    check_no_gradient(tensors, "causal_conv1d_step", "or use causal_conv1d()")
    return problem


def _check_device(name: str, tensor: object, x: Tensor) -> None:
    if isinstance(tensor, Tensor) and tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, x is on {x.device}")


def _check_offsets(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """Returns cu_seqlens in int32."""
    B, _, T = x.shape
    _check_device("cu_seqlens", cu_seqlens, x)
    cu_seqlens = check_cu_seqlens("cu_seqlens", cu_seqlens, x.device)
    if B != 1:
        raise ValueError(f"x must have one batch entry with cu_seqlens, got {B}")
    if T >= 1 << 31:
        raise ValueError(f"x must have fewer than 2^31 tokens with cu_seqlens, got {T}")
    if values_are_readable(cu_seqlens):
        read_starts("cu_seqlens", cu_seqlens, T, "x")
    return cu_seqlens.to(torch.int32).contiguous()


def reference_conv(x: Inputs, options: Options) -> Results:
    """Returns y and the final state in plain torch, which differentiates them to any order."""
    T, W = x.x.shape[2], x.weight.shape[1]
    if x.cu_seqlens is None:
        state = _given_state(x, x.x.shape[0])
        joined = torch.cat([state, x.x], dim=2)
        inputs, end = [joined[:, :, w : w + T] for w in range(W)], joined[:, :, T:]
    else:
        inputs, end = _packed(x, x.cu_seqlens)
    dtype = accumulate_dtype(x.x.dtype)
    weight = x.weight.to(dtype)[..., None]
    y = sum((part.to(dtype) * weight[:, w] for w, part in enumerate(inputs)), start=_bias(x, dtype))
    y = silu(y) if options.silu else y
    if x.cu_seqlens is not None:
        y = y.masked_fill(torch.arange(T, device=y.device) >= x.cu_seqlens[-1], 0)
    return Results(y.to(x.x.dtype), end.clone())


def _bias(x: Inputs, dtype: torch.dtype) -> Tensor:
    C = x.x.shape[1]
    bias = x.x.new_zeros(C) if x.bias is None else x.bias
    return bias.to(dtype)[:, None]


def _given_state(x: Inputs, B: int) -> Tensor:
    if x.state is not None:
        return x.state
    return x.x.new_zeros(B, x.x.shape[1], x.weight.shape[1] - 1)


def _packed(x: Inputs, cu_seqlens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns the W inputs of every token, and the final states. Reads no offset."""
    (_, C, T), h = x.x.shape, x.weight.shape[1] - 1
    B = cu_seqlens.shape[0] - 1
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    token = torch.arange(T, device=x.x.device)
    values = x.x.masked_fill(token >= cu_seqlens[-1], 0)  # padding may be NaN
    before = pad(values, (h, 0))  # (1, C, h + T)
    # one more, for the tokens after the last sequence
    state = pad(_given_state(x, B), (0, 0, 0, 0, 0, 1))
    sequence = torch.searchsorted(ends, token, right=True)
    position = token - pad(starts, (0, 1))[sequence]
    inputs = []
    for w in range(h + 1):
        index = position + w  # in [state, x]
        stored = state[sequence, :, index.clamp(max=h - 1)].mT  # (C, T)
        inputs.append(torch.where(index < h, stored, before[:, :, w : w + T]))
    last = torch.arange(h, device=x.x.device)
    index = (ends - starts)[:, None] + last  # (B, h), in [state, x]
    of_x = before[0][:, ends[:, None] + last].movedim(0, 1)  # (B, C, h)
    of_state = state[:-1].gather(2, index.clamp(max=h - 1)[:, None].expand(B, C, h))
    return inputs, torch.where((index < h)[:, None], of_state, of_x)


def _empty_results(x: Inputs, options: Options) -> Results:
    B = x.x.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    C, W = x.weight.shape
    return Results(empty_like_layout(x.x), x.x.new_empty(B, C, W - 1))


CONV = Family(
    name="conv",
    functions=("causal_conv1d", "causal_conv1d_step"),
    Inputs=Inputs,
    Options=Options,
    Results=Results,
    Cotangents=Cotangents,
    Gradients=Gradients,
    overwritten=("state",),
    reference=reference_conv,
    empty_results=_empty_results,
    laid_out=1,
)

CONV_BACKENDS: tuple[Backend, ...] = (
    CpuBackend(CONV, "csrc/cpu/conv", most_steps=32),
    ReferenceBackend(CONV, "products of shifted inputs in torch"),
)
"""In the order in which backend="auto" tries them."""

if extension.unavailable_reason() is None:
    register_compiled(CONV, NAMESPACE)
