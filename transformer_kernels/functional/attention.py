"""`attention`, the operator: validate, choose a backend, call it."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from transformer_kernels.dispatch import fast_path
from transformer_kernels.dispatch.autocast import cast_for_autocast, without_autocast
from transformer_kernels.dispatch.autograd import attend
from transformer_kernels.dispatch.choose import choose
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.attention import build_problem
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.sinks import join_sinks


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Masked scaled dot-product attention: softmax(scale q k^T + bias) v, without M x N memory.

    Args:
        q: queries (B, H_q, M, D); float16, bfloat16, float32 or float64, any strides.
        k: keys (B, H_kv, N, D), same dtype and device; H_q is a multiple of H_kv (GQA, MQA).
        v: values (B, H_kv, N, D_v).
        mask: what may attend to what; None = everything.
        bias: added to the scores after scaling: a tensor broadcastable to (B, H_q, M, N) in q's
            dtype or float32, differentiable; or `alibi(slopes)`.
        scale: multiplies q k^T; 1/sqrt(D) unless given.
        softcap: scores become softcap * tanh(score / softcap), before the bias.
        dropout_p: probability with which an attention weight is dropped, 0 to 1.
        seed: of the dropout bits, int or int64 scalar tensor; drawn from torch's generator unless
            given. The bits depend on (seed, b, h, i, j) alone, whatever the backend.
        sinks: (H_q,) a logit a head that joins the softmax's denominator; differentiable.
        return_lse: also return log sum exp of the scores (natural log), differentiable, float32
            (float64 for float64) (B, H_q, M); -inf in rows with no visible key. With sinks it
            includes them.
        backend: "auto", or the name of one backend, which then runs or raises.

    Returns:
        o (B, H_q, M, D_v) in q's dtype, or (o, lse). Rows with no visible key are 0.

    Raises:
        TypeError, ValueError: an argument is not as above, or the named backend cannot take it.

    Source: docs/attention.md; Dao et al. 2022, arXiv:2205.14135.
    """
    if (
        bias is None
        and softcap is None
        and seed is None
        and sinks is None
        and type(dropout_p) is float
        and dropout_p == 0.0
        and not return_lse
        and backend in ("auto", "cpu")
    ):
        plain_o = fast_path.attend(q, k, v, mask, scale)
        if plain_o is not None:
            return plain_o
    q, k, v = cast_for_autocast(q, k, v)
    problem, tensor_args = build_problem(
        q, k, v, mask, bias, scale, softcap, dropout_p, seed, sinks
    )
    chosen = choose(problem, backend)
    with without_autocast(q.device.type):
        o, lse = attend(chosen, q, k, v, tensor_args, problem)
    if sinks is not None:
        o, lse = join_sinks(o, lse, sinks)
    return (o, lse) if return_lse else o
