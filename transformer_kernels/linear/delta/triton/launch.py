"""Host side of the gated delta rule: the launches of a forward pass, of a backward pass and of
steps.

docs/delta.md, section 6, explains the passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ....backends.triton.kernels.arguments import Rows, contiguous, rows
from ....backends.triton.launch import as_rows
from ....backends.triton.launch import launch as launch_kernel
from ...family import BackwardCall
from ...triton.passes import blocks
from ..types import Gradients, Inputs, Options, Results
from .kernels.arguments import CHANNELS
from .kernels.decay import decay_gradient_kernel, sums_kernel
from .kernels.gradients import own_pairs_kernel, pair_gradients_kernel, state_gradients_kernel
from .kernels.pairs import merge_kernel, pairs_kernel
from .kernels.reverse import reverse_kernel
from .kernels.scan import scan_kernel
from .kernels.steps import steps_kernel
from .passes import Pass, prepare


class Prepared(NamedTuple):
    """Results of the kernels that precede the scans."""

    high: Rows
    low: Rows
    """running sums of the log-decays, see `kernels.decay.Sums`"""
    X: Tensor
    P: Tensor
    T: Tensor
    """pairs of the tokens of a chunk, see kernels/pairs.py"""


def forward(x: Inputs, options: Options) -> Results:
    call = prepare(x, options)
    o, S = call.output(x.v), call.states(call.B)
    scan(call, prepare_pairs(call), o=rows(o), end=S)
    return Results(o, S)


def backward(given: BackwardCall) -> Gradients:
    """Recomputes all that the gradients need from the inputs."""
    call = prepare(given.x, given.options)
    q, k, v, log_decay, beta, S = call.x[:6]
    do, dS_end = as_rows(given.cotangents.d_o), contiguous(given.cotangents.dS_end)
    made, D, D_v = prepare_pairs(call), k.shape[3], v.shape[3]
    states, gradients = (call.states(call.boundaries) for _ in range(2))
    residuals, y = call.rows(D_v), call.rows(D_v)
    scan(call, made, states=states, residuals=residuals)
    dq, dk, dv = (call.output(tensor) for tensor in given.x[:3])
    dS = None if S is None else call.states(call.B)
    sums = made.high, made.low
    launch(
        call, reverse_kernel, call.B * call.slices, *map(rows, (q, k, do, dv)), y, *sums, beta,
        made.X, made.P, made.T, dS_end, dS, gradients,
    )  # fmt: skip
    terms = [call.rows(D) for _ in range(3)]
    dX, dP, dbeta = call.squares(), call.squares(), call.contiguous(beta)
    at_end = log_decay.new_empty(call.boundaries, call.heads.H_q, log_decay.shape[3])
    launch(
        call, state_gradients_kernel, call.programs, rows(do), y, residuals, *sums, beta,
        states, gradients, *terms, dX, dP, dbeta, at_end,
    )  # fmt: skip
    dc, dlog_decay = call.rows(log_decay.shape[3]), call.contiguous(log_decay)
    pairs = rows(q), rows(k), *sums, *terms, dX, dP
    if log_decay.shape[3] > 1:
        channels = call.sub_blocks * blocks(D, CHANNELS)
        launch(call, own_pairs_kernel, channels, *pairs)
    group = v.shape[1] // k.shape[1]
    launch(
        call, pair_gradients_kernel, call.sub_blocks, *pairs, rows(dq), rows(dk), dc, group=group
    )
    launch_gates(call, decay_gradient_kernel, rows(dlog_decay), rows(log_decay), dc, at_end)
    return Gradients(dq, dk, dv, dlog_decay, dbeta, dS)


def steps(x: Inputs, options: Options) -> Tensor:
    """Returns o and overwrites x.S, which is contiguous, by the final state."""
    call = prepare(x, options)
    assert call.x.S is not None
    o = call.output(x.v)
    operands = map(rows, (*call.x[:3], o, call.x.log_decay))
    launch(call, steps_kernel, call.B * call.slices, *operands, call.x.beta, call.x.S)
    return o


def prepare_pairs(call: Pass) -> Prepared:
    q, k, _, log_decay, beta = call.x[:5]
    high, low = (call.rows(log_decay.shape[3]) for _ in range(2))
    launch_gates(call, sums_kernel, rows(log_decay), high, low)
    made = Prepared(high, low, *(call.squares() for _ in range(3)))
    launch(call, pairs_kernel, call.sub_blocks, rows(q), rows(k), *made[:2], beta, *made[2:])
    if call.sub_blocks > call.programs:
        launch(call._replace(sizes=call.solve), merge_kernel, call.programs, beta, made.X, made.T)
    return made


def scan(
    call: Pass,
    made: Prepared,
    *,
    o: Rows | None = None,
    residuals: Rows | None = None,
    end: Tensor | None = None,
    states: Tensor | None = None,
) -> None:
    """Computes those results that are given; see `scan_kernel`."""
    q, k, v, _, beta, S = call.x[:6]
    launch(
        call, scan_kernel, call.B * call.slices, *map(rows, (q, k, v)), o, residuals, *made[:2],
        beta, made.P, made.T, S, end, states,
    )  # fmt: skip


def launch_gates(call: Pass, kernel: Any, *args: Any) -> None:
    """Launches a kernel on slices of the gates."""
    launch(call, kernel, call.programs * blocks(call.x.log_decay.shape[3], CHANNELS), *args)


def launch(call: Pass, kernel: Any, programs: int, *args: Any, group: int = 1) -> None:
    """Launches `programs` for each head of v, or for each `group` of them."""
    launch_kernel(
        kernel,
        programs * call.heads.H_q // group,
        *args,
        call.x.cu_seqlens,
        *call.scalars,
        call.heads,
        call.sizes,
        num_warps=call.tile.warps,
        num_stages=call.tile.stages,
    )
