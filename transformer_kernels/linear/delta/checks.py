"""Validation of calls of the gated delta rule. Errors name the argument, its value and the rule."""

from __future__ import annotations

from torch import Tensor

from ...common.argument_checks import check_bool, check_number, check_tensor, values_are_readable
from ...common.storage import check_storage
from ...dispatch.autocast import cast_for_autocast
from ...problem import Shape
from ...problem.cache import check_no_gradient
from ...problem.checks import check_alike
from ...problem.types import accumulate_dtype
from ...problem.varlen import one_entry
from ..checks import DENSE, PACKED, check_offsets
from ..family import FamilyProblem
from .types import Inputs, Options


def dense_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None,
    l2norm: bool,
    initial_state: Tensor | None,
    state_name: str = "initial_state",
) -> FamilyProblem:
    """Returns the call of `gated_delta_rule`."""
    q, k, v = _checked(q, k, v, DENSE)
    shape = _shape_of(q, k, v)
    log_decay, beta = _gates(q, log_decay, beta, (shape.B, shape.H_q, shape.M))
    _check_sign(log_decay)
    S = _check_state(state_name, initial_state, shape)
    options = _options(scale, l2norm, shape.D)
    return FamilyProblem(shape, Inputs(q, k, v, _by_gate(log_decay), beta, S), options)


def varlen_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None,
    l2norm: bool,
    initial_state: Tensor | None,
) -> FamilyProblem:
    """Returns the call of `gated_delta_rule_varlen`."""
    q, k, v = _checked(q, k, v, PACKED)
    cu_seqlens, total = check_offsets(cu_seqlens, q)
    log_decay, beta = _gates(q, log_decay, beta, (q.shape[0], v.shape[1]))
    _check_sign(log_decay if total is None else log_decay[:total])
    q, k, v, log_decay = (one_entry(x) for x in (q, k, v, _by_gate(log_decay, 2)))
    shape = _shape_of(q, k, v)._replace(B=cu_seqlens.shape[0] - 1)
    S = _check_state("initial_state", initial_state, shape)
    options = _options(scale, l2norm, shape.D)
    return FamilyProblem(shape, Inputs(q, k, v, log_decay, beta.mT[None], S, cu_seqlens), options)


def step_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None,
    l2norm: bool,
) -> FamilyProblem:
    """Returns the call of `gated_delta_rule_step`."""
    if state is None:
        raise TypeError("state must be a tensor, got None")
    problem = dense_problem(
        q, k, v, log_decay, beta,
        scale=scale, l2norm=l2norm, initial_state=state, state_name="state",
    )  # fmt: skip
    if not state.is_contiguous():
        raise ValueError(f"state must be contiguous, got strides {state.stride()}")
    check_no_gradient(
        {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state},
        "gated_delta_rule_step",
        "or use gated_delta_rule()",
    )
    return problem


def _checked(
    q: Tensor, k: Tensor, v: Tensor, dimensions: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Casts q, k and v for autocast and checks them."""
    q, k, v = cast_for_autocast(q, k, v)
    named = (("q", q), ("k", k), ("v", v))
    check_alike(named, (dimensions,) * 3)
    rule = None
    if q.shape != k.shape:
        rule = "q and k must have the same shape"
    elif any(
        q.shape[n] != v.shape[n] for n, name in enumerate(dimensions) if name in ("batch", "length")
    ):
        rule = "q, k and v must share the batch size and the length"
    elif k.shape[1] == 0 or v.shape[1] == 0 or v.shape[1] % k.shape[1] != 0:
        rule = "v's heads must be a positive multiple of k's"
    elif k.shape[-1] == 0 or v.shape[-1] == 0:
        rule = "the widths D and D_v must be at least 1"
    if rule is not None:
        shapes = (f"{name} {tuple(x.shape)}" for name, x in named)
        raise ValueError(f"{rule}, got {', '.join(shapes)}")
    return q, k, v


def _shape_of(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """Returns the sizes of a call: the value heads are those of the result."""
    B, H_k, T, D = k.shape
    return Shape(B, v.shape[1], H_k, T, T, D, v.shape[3], q.dtype, q.device)


def _options(scale: float | None, l2norm: bool, D: int) -> Options:
    check_bool("l2norm", l2norm)
    return Options(D**-0.5 if scale is None else check_number("scale", scale), l2norm)


def _gates(
    q: Tensor, log_decay: Tensor | None, beta: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Returns log_decay, zeros for None, and beta in the dtype of the state.

    `sizes` are those of beta: the heads of v, the tokens and, unless they are packed, the batch.
    """
    beta = _gate("beta", beta, q, sizes)
    if log_decay is None:
        return beta.new_zeros((1,) * len(sizes)).expand(sizes), beta
    return _gate("log_decay", log_decay, q, sizes, (*sizes, q.shape[-1])), beta


def _gate(name: str, x: Tensor, q: Tensor, *allowed: tuple[int, ...]) -> Tensor:
    dtype = accumulate_dtype(q.dtype)
    check_tensor(name, x, (dtype, q.dtype), q.device)
    check_storage(((name, x),))
    if tuple(x.shape) not in allowed:
        listed = " or ".join(map(str, allowed))
        raise ValueError(f"{name} must be {listed}, got shape {tuple(x.shape)}")
    return x.to(dtype)


def _by_gate(log_decay: Tensor, tokens: int = 3) -> Tensor:
    """Returns log_decay with a last dimension of gates: one, unless each channel has its own.

    `tokens` are the dimensions of a log-decay of one number for each token.
    """
    return log_decay.unsqueeze(-1) if log_decay.dim() == tokens else log_decay


def _check_sign(log_decay: Tensor) -> None:
    if not values_are_readable(log_decay) or log_decay.numel() == 0:
        return
    largest = log_decay.detach().max().item()
    if largest > 0:
        raise ValueError(
            "log_decay must be at most 0, the logarithm of a factor of at most 1, got "
            f"{largest:.6g}"
        )


def _check_state(name: str, state: Tensor | None, shape: Shape) -> Tensor | None:
    """Returns the state; raises unless it fits the call."""
    if state is None:
        return None
    check_tensor(name, state, (shape.accumulate_dtype,), shape.device)
    check_storage(((name, state),))
    wanted = (shape.B, shape.H_q, shape.D, shape.D_v)
    if state.shape != wanted:
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(state.shape)}")
    return state.contiguous()
