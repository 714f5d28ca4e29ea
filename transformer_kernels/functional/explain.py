"""The `explain` function: reports the backend and kernel of a call without running it."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels.argument_checks import check_bool
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
    """Explains which backend and kernel `attention` would run, and why each other one would not.

    Nothing is computed, and no seed is drawn from torch's generator.

    Args:
        q: as for `attention`, like all other arguments.
        k: as for `attention`.
        v: as for `attention`.
        mask: as for `attention`.
        bias: as for `attention`.
        scale: as for `attention`.
        softcap: as for `attention`.
        dropout_p: as for `attention`.
        seed: as for `attention`.
        sinks: as for `attention`.
        return_lse: as for `attention`; does not affect the choice.
        backend: "auto", or the name of the only backend to consider.

    Returns:
        An `Explanation` with the chosen backend (None if no backend supports the call), its kernel,
        and for each backend the reasons why it does not support the call. `str()` of it is a
        readable report.

    Raises:
        TypeError, ValueError: as for `attention` if an argument is invalid.
    """
    check_bool("return_lse", return_lse)
    q, k, v = cast_for_autocast(q, k, v)
    # A fixed seed: explain must not advance torch's generator.
    seed = 0 if seed is None else seed
    problem, tensor_args = build_problem(
        q, k, v, mask, bias, scale, softcap, dropout_p, seed, sinks
    )
    return explanation(problem, backend, q, k, v, tensor_args)
