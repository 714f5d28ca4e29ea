"""The `explain` function: reports the backend and kernel of a call without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..backends import BACKENDS
from ..common.argument_checks import check_bool, shown
from ..dispatch import fast_path
from ..dispatch.autocast import cast_bias, cast_for_autocast
from ..dispatch.choose import Explanation, explanation
from ..dispatch.division import check_undivided
from ..dispatch.gather import gathering
from ..linear import checks as linear_checks
from ..linear.attention import LINEAR_BACKENDS, STEP_BACKENDS
from ..linear.checks import DENSE, PACKED, check_options, map_features
from ..linear.convolution import CONV_BACKENDS, check_activation, conv_problem, step_problem
from ..linear.delta import checks as delta_checks
from ..linear.delta.backends import DELTA_BACKENDS
from ..linear.family import FamilyProblem
from ..problem.cache import cache_problem, check_no_gradient
from ..problem.checks import check_learned_scale
from ..problem.dense import dense_problem
from ..problem.int8_cache import check_scale_values
from ..problem.layout import Layout
from ..problem.pages import count_keys
from ..problem.varlen import one_entry, varlen_problem
from .attention import attention
from .causal_conv1d import causal_conv1d, causal_conv1d_step
from .decode import attention_decode
from .delta_rule import gated_delta_rule, gated_delta_rule_step, gated_delta_rule_varlen
from .linear_attention import linear_attention
from .linear_decode import linear_attention_decode
from .linear_varlen import linear_attention_varlen
from .varlen import attention_varlen

_LINEAR_OPTIONS = ("causal", "normalize", "eps")
_LINEAR = (linear_attention, linear_attention_varlen, linear_attention_decode)
_DELTA: dict[Any, Callable[..., FamilyProblem]] = {
    gated_delta_rule: delta_checks.dense_problem,
    gated_delta_rule_varlen: delta_checks.varlen_problem,
    gated_delta_rule_step: delta_checks.step_problem,
}
_CONV = (causal_conv1d, causal_conv1d_step)
_OPERATORS = (attention, attention_varlen, attention_decode, *_LINEAR, *_DELTA, *_CONV)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *args: Any,
    operator: Callable[..., Any] = attention,
    **arguments: Any,
) -> Explanation:
    """Explains which backend and kernel a call would run, and why each other one would not.

    Nothing is computed, and no seed is drawn from torch's generator.

    Examples:
        >>> print(explain(q, k, v, mask=Mask.causal()))
        >>> print(explain(q, k_cache, v_cache, cache_seqlens, operator=attention_decode))
        >>> print(explain(x, weight, bias, operator=causal_conv1d))

    Args:
        q: the operator's first argument. All arguments but `operator` are as for the operator.
        k: its second one: keys, a key cache, or the weight of a convolution.
        v: its third one: values, a value cache, or the bias of a convolution.
        args: further positional arguments of the operator.
        operator: `attention`, `attention_varlen`, `attention_decode`, `linear_attention`,
            `linear_attention_varlen`, `linear_attention_decode`, `gated_delta_rule`,
            `gated_delta_rule_varlen`, `gated_delta_rule_step`, `causal_conv1d` or
            `causal_conv1d_step`.
        arguments: keyword arguments of the operator. `backend` is the only backend to consider,
            or "auto".

    Returns:
        An `Explanation` with the chosen backend (None if no backend supports the call), its kernel,
        for each backend the reasons why it does not support the call, and the reason why the call
        takes the general path. `str()` of it is a readable report.

    Raises:
        TypeError, ValueError: as for the operator if an argument is invalid.
        ValueError: the operator is none of these.
    """
    if operator not in _OPERATORS:
        *others, last = (each.__name__ for each in _OPERATORS)
        raise ValueError(f"operator must be {', '.join(others)} or {last}, got {shown(operator)}")
    check_undivided("explain")
    options = _bound(operator, q, k, v, *args, **arguments)
    general_path = _general_path(operator, options)
    backend = options.pop("backend")
    explain_as = _explain_attention
    if operator in _LINEAR:
        explain_as = _explain_linear
    elif operator in _DELTA:
        explain_as = _explain_delta
    elif operator in _CONV:
        explain_as = _explain_conv
    return explain_as(operator, backend, options, general_path)


def _bound(operator: Callable[..., Any], *args: Any, **arguments: Any) -> dict[str, Any]:
    """Returns the arguments of a call by name, with the defaults of the operator."""
    call = inspect.signature(operator).bind(*args, **arguments)
    call.apply_defaults()
    return call.arguments


def _general_path(operator: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The reason why a call takes the general path; "" if it takes the fast path."""
    if operator not in (attention, attention_decode):
        return f"{operator.__name__} has no fast path"
    options = dict(arguments)
    if operator is attention_decode:
        of_cache = ("cache_seqlens", "block_table", "k_scale", "v_scale")
        options["layout"] = Layout(**{name: options.pop(name) for name in of_cache})
        options["k"], options["v"] = options.pop("k_cache"), options.pop("v_cache")
    known = inspect.signature(fast_path.plain_attention).parameters
    others = [options.pop(name) for name in options.keys() - known.keys()]
    is_plain = all(x is None for x in others)
    reason = fast_path.plain_attention(**options, is_plain=is_plain, runs=False)
    return reason if isinstance(reason, str) else ""


def _explain_attention(
    operator: Callable[..., Any], backend: str, options: dict[str, Any], general_path: str
) -> Explanation:
    q, k, v, *_ = options.values()
    check_bool("return_lse", options.pop("return_lse"))
    decodes = operator is attention_decode
    if decodes and (type(backend) is not str or backend != "reference"):
        names = ("q", "k_cache", "v_cache", "bias", "relative", "scale", "sinks")
        check_no_gradient({name: options[name] for name in names})
    if isinstance(options["scale"], Tensor):
        check_learned_scale(q, options["scale"])
        options["scale"] = 1.0
    if decodes:
        problem = cache_problem(**options)
        check_scale_values(problem)
        return explanation(problem, backend, q, k, v, BACKENDS, general_path)
    q, k, v = cast_for_autocast(q, k, v)
    options.update(q=q, k=k, v=v, bias=cast_bias(options["bias"], q))
    if options["seed"] is None:
        options["seed"] = 0  # drawing a seed would advance torch's generator
    if operator is attention:
        problem = dense_problem(**options)
        explained = explanation(problem, backend, q, k, v, BACKENDS, general_path)
        gathered = gathering(problem, q, k, v, backend)
        return explained if gathered is None else gathered.explained(explained)
    problem = varlen_problem(**options)
    if problem.layout.block_table is not None:  # the kernel is that of packed keys
        keys = count_keys(problem.layout, k)
        k, v = (x.new_empty(keys, x.shape[1], x.shape[3]) for x in (k, v))
        problem = replace(problem, layout=problem.layout._replace(block_table=None))
    q, k, v = one_entry(q), one_entry(k), one_entry(v)
    return explanation(problem, backend, q, k, v, BACKENDS, general_path)


def _explain_linear(
    operator: Callable[..., Any], backend: str, options: dict[str, Any], general_path: str
) -> Explanation:
    check_bool("return_state", options.pop("return_state", False))
    feature_map = options.pop("feature_map")
    names = ("normalize", "eps") if operator is linear_attention_decode else _LINEAR_OPTIONS
    checked = check_options(feature_map, **({"causal": True} | {x: options.pop(x) for x in names}))
    dimensions = PACKED if operator is linear_attention_varlen else DENSE
    q, k, v = (options.pop(name) for name in "qkv")
    q, k, v = map_features(feature_map, q, k, v, dimensions)
    makers: dict[Any, Callable[..., FamilyProblem]] = {
        linear_attention: linear_checks.dense_problem,
        linear_attention_varlen: linear_checks.varlen_problem,
        linear_attention_decode: linear_checks.decode_problem,
    }
    problem = makers[operator](q, k, v, options=checked, **options)
    x = problem.inputs
    backends = STEP_BACKENDS if operator is linear_attention_decode else LINEAR_BACKENDS
    return explanation(problem, backend, x.q, x.k, x.v, backends, general_path)


def _explain_delta(
    operator: Callable[..., Any], backend: str, options: dict[str, Any], general_path: str
) -> Explanation:
    check_bool("return_state", options.pop("return_state", False))
    problem = _DELTA[operator](**options)
    x = problem.inputs
    return explanation(problem, backend, x.q, x.k, x.v, DELTA_BACKENDS, general_path)


def _explain_conv(
    operator: Callable[..., Any], backend: str, options: dict[str, Any], general_path: str
) -> Explanation:
    check_bool("return_state", options.pop("return_state", False))
    checked = check_activation(options.pop("activation"))
    if operator is causal_conv1d:
        problem = conv_problem(options=checked, state=options.pop("initial_state"), **options)
    else:
        problem = step_problem(options=checked, **options)
    x = problem.inputs
    last = x.weight if x.bias is None else x.bias
    return explanation(problem, backend, x.x, x.weight, last, CONV_BACKENDS, general_path)
