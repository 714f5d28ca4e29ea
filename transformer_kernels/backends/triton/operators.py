"""Torch operators `triton_forward` and `triton_backward`, opaque to torch.compile.

Their definition does not import Triton; the first call does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import schema
from transformer_kernels.problem import AttentionProblem, SavedForBackward, TensorArgs
from transformer_kernels.storage import check_storage

_NUM_TENSOR_ARGS = len(TensorArgs._fields)


def _problem(
    q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs, scalar_args: tuple[Any, ...]
) -> AttentionProblem:
    scale, softcap, dropout_p, low, high, block_size, alibi_offset, bottom_right, M, N = scalar_args
    cu_seqlens_q = tensor_args.cu_seqlens_q
    return AttentionProblem(
        B=q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        H_q=q.shape[1],
        H_kv=k.shape[1],
        M=min(M, q.shape[2]),  # a larger max_seqlen would add empty programs
        N=min(N, k.shape[2]),
        D=q.shape[3],
        D_v=v.shape[3],
        dtype=q.dtype,
        device=q.device,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        diagonal_low=low,
        diagonal_high=high,
        block_size=block_size,
        alibi_offset=alibi_offset,
        bottom_right=bottom_right,
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    from transformer_kernels.backends.triton import launch

    tensor_args = TensorArgs(*options[:_NUM_TENSOR_ARGS])
    check_storage((("q", q), ("k", k), ("v", v), *tensor_args._asdict().items()))
    problem = _problem(q, k, v, tensor_args, options[_NUM_TENSOR_ARGS:])
    with _device_of(q):
        return launch.forward(launch.prepare(q, k, v, tensor_args, problem))


def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    block_mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from transformer_kernels.backends.triton import launch

    *given, bias_needs_grad = options
    tensor_args = TensorArgs(*given[:_NUM_TENSOR_ARGS])
    problem = _problem(q, k, v, tensor_args, tuple(given[_NUM_TENSOR_ARGS:]))
    saved = SavedForBackward(q, k, v, o, lse, block_mask)
    given_tensors = (*saved._asdict().items(), *tensor_args._asdict().items())
    check_storage((("do", do), ("dlse", dlse), *given_tensors))
    with _device_of(q):
        call = launch.prepare(q, k, v, tensor_args, problem)
        dq, dk, dv, dbias = launch.backward(call, do, dlse, saved, bias_needs_grad)
    return dq, dk, dv, q.new_empty(0) if dbias is None else dbias


def _device_of(x: Tensor) -> Any:
    """Makes x's device current: Triton launches on the current device."""
    return torch.cuda.device_of(x)


_LIBRARY = torch.library.Library("transformer_kernels", "FRAGMENT")
_LIBRARY.define(
    f"triton_forward(Tensor q, Tensor k, Tensor v, {schema.OPTIONS}) "
    "-> (Tensor o, Tensor lse, Tensor block_mask)"
)
_LIBRARY.define(
    "triton_backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"Tensor? block_mask, {schema.OPTIONS}, bool bias_needs_grad) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)
for _key in ("CPU", "CUDA"):  # CPU tensors are for Triton's interpreter
    _LIBRARY.impl("triton_forward", _forward, _key)
    _LIBRARY.impl("triton_backward", _backward, _key)
torch.library.register_fake(
    "transformer_kernels::triton_forward", schema.forward_fake, lib=_LIBRARY
)
torch.library.register_fake(
    "transformer_kernels::triton_backward", schema.backward_fake, lib=_LIBRARY
)

forward = torch.ops.transformer_kernels.triton_forward.default
backward = torch.ops.transformer_kernels.triton_backward.default
