"""Which kernel a call would run, without running it."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels.dispatch.autocast import cast_for_autocast
from transformer_kernels.dispatch.choose import Explanation, explanation
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.attention import build_problem
from transformer_kernels.scores.alibi import Alibi


def explain(
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
) -> Explanation:
    """Takes what `attention` takes; tells which backend and kernel would run, and every reason why
    each other one would not. Raises what `attention` would raise for bad input."""
    q, k, v = cast_for_autocast(q, k, v)
    # A seed of its own, lest explaining draw one from torch's generator.
    seed = 0 if seed is None else seed
    problem, tensor_args = build_problem(
        q, k, v, mask, bias, scale, softcap, dropout_p, seed, sinks
    )
    return explanation(problem, backend, q, k, v, tensor_args)
