"""The operators of this package, for torch's tools that take operators.

Importing this module registers the formulas by which `torch.utils.flop_counter.FlopCounterMode`
counts them. As torch's own, these count matrix products, and the scores again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..backends.schema import unpack_backward
from ..common.namespace import NAMESPACE
from ..linear.attention import LINEAR
from ..linear.delta.backends import DELTA
from ..problem import unpack
from ..problem.operations import (
    backward_operations,
    delta_backward_operations,
    delta_forward_operations,
    forward_operations,
    linear_backward_operations,
    linear_forward_operations,
    visible_pairs,
)


def _available(*names: str) -> list[Any]:
    """Returns the operators of these names. Compiled ones need the extension."""
    namespace = getattr(torch.ops, NAMESPACE)
    return [getattr(namespace, name) for name in names if hasattr(namespace, name)]


def _counts(*names: str) -> Callable[[Any], Any]:
    """Registers a formula of the arguments of these operators."""
    return register_flop_formula(_available(*names), get_raw=True)


@_counts("attention_forward", "triton_forward")
def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any, out_val: Any) -> int:
    problem = unpack(q, k, v, options)
    return forward_operations(visible_pairs(problem), problem.shape.D, problem.shape.D_v)


@_counts("attention_backward", "triton_backward")
def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any
) -> int:
    options, _ = unpack_backward(rest[3:])  # without o, lse, block_mask
    problem = unpack(q, k, v, options)
    return backward_operations(visible_pairs(problem), problem.shape.D, problem.shape.D_v)


@_counts("linear_forward", "triton_linear_forward")
def _linear_forward(*arguments: Any, out_val: Any) -> int:
    return linear_forward_operations(*_linear_sizes(*arguments[:3]))


@_counts("linear_backward", "triton_linear_backward")
def _linear_backward(*arguments: Any, out_val: Any) -> int:
    return linear_backward_operations(*_linear_sizes(*LINEAR.unpack_backward(arguments).x[:3]))


@_counts("linear_steps", "triton_linear_steps")
def _linear_steps(*arguments: Any, out_val: Any) -> int:
    return linear_forward_operations(*_linear_sizes(*arguments[:3]))


def _linear_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Returns the rows of q and of k, D and D_v."""
    return q.shape[:3].numel(), k.shape[:3].numel(), k.shape[3], v.shape[3]


@_counts("delta_forward", "triton_delta_forward")
def _delta_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any) -> int:
    return delta_forward_operations(v.shape[:3].numel(), k.shape[3], v.shape[3])


@_counts("delta_backward", "triton_delta_backward")
def _delta_backward(*arguments: Any, out_val: Any) -> int:
    _, k, v, *_ = DELTA.unpack_backward(arguments).x
    return delta_backward_operations(v.shape[:3].numel(), k.shape[3], v.shape[3])


@_counts("delta_steps", "triton_delta_steps")
def _delta_steps(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any) -> int:
    return delta_forward_operations(v.shape[:3].numel(), k.shape[3], v.shape[3])


def forward_operators() -> tuple[Any, ...]:
    """Returns the operators of the forward kernels of attention, linear attention, the delta rule
    and the causal convolution.

    A policy of `torch.utils.checkpoint.create_selective_checkpoint_contexts` that saves their
    results runs each of them once. docs/quickstarts/torch.md has an example.
    """
    names = [f"{name}_forward" for name in ("attention", "linear", "delta", "conv")]
    names += ["triton_forward", "triton_linear_forward", "triton_delta_forward"]
    return tuple(operator.default for operator in _available(*names))
