"""The `explain` function: reports the backend and kernel of a call without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from transformer_kernels.argument_checks import check_bool, shown
from transformer_kernels.dispatch.autocast import cast_for_autocast
from transformer_kernels.dispatch.choose import Explanation, explanation
from transformer_kernels.functional.attention import attention
from transformer_kernels.functional.decode import attention_decode
from transformer_kernels.functional.varlen import attention_varlen
from transformer_kernels.problem.cache import cache_problem, check_no_gradient
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.problem.varlen import one_entry, varlen_problem


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    operator: Callable[..., Any] = attention,
    **arguments: Any,
) -> Explanation:
    """Explains which backend and kernel a call would run, and why each other one would not.

    Nothing is computed, and no seed is drawn from torch's generator.

    >>> print(explain(q, k, v, mask=Mask.causal()))
    >>> print(explain(q, k_cache, v_cache, cache_seqlens, operator=attention_decode))

    Args:
        q: as for the operator, like all arguments but `operator`.
        k: as for the operator: keys, or a key cache.
        v: as for the operator: values, or a value cache.
        args: further positional arguments of the operator.
        operator: `attention`, `attention_varlen` or `attention_decode`.
        arguments: keyword arguments of the operator. `backend` is the only backend to consider,
            or "auto".

    Returns:
        An `Explanation` with the chosen backend (None if no backend supports the call), its kernel,
        and for each backend the reasons why it does not support the call. `str()` of it is a
        readable report.

    Raises:
        TypeError, ValueError: as for the operator if an argument is invalid.
        ValueError: the operator is not one of the three.
    """
    if operator not in (attention, attention_varlen, attention_decode):
        raise ValueError(
            "operator must be attention, attention_varlen or attention_decode, "
            f"got {shown(operator)}"
        )
    call = inspect.signature(operator).bind(q, k, v, *args, **arguments)
    call.apply_defaults()
    options = call.arguments
    backend = options.pop("backend")
    check_bool("return_lse", options.pop("return_lse"))
    if operator is attention_decode:
        if type(backend) is not str or backend != "reference":
            names = ("q", "k_cache", "v_cache", "bias", "relative", "sinks")
            check_no_gradient({name: options[name] for name in names})
        return explanation(cache_problem(**options), backend, q, k, v)
    q, k, v = cast_for_autocast(q, k, v)
    options.update(q=q, k=k, v=v)
    if options["seed"] is None:
        options["seed"] = 0  # drawing a seed would advance torch's generator
    if operator is attention:
        return explanation(dense_problem(**options), backend, q, k, v)
    return explanation(varlen_problem(**options), backend, *map(one_entry, (q, k, v)))
