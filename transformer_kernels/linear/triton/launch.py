"""Host side of linear attention: the launches of a forward pass, of a backward pass and of steps.

docs/linear.md, section 6, explains segments, boundaries and the four results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends.triton.kernels.arguments import contiguous, rows
from ...backends.triton.launch import as_rows
from ...backends.triton.launch import launch as launch_kernel
from ..family import BackwardCall
from ..types import Gradients, Inputs, Options, Results
from .kernels.arguments import States, Statistics
from .kernels.decay import decay_gradient_kernel
from .kernels.results import results_kernel
from .kernels.states import prefix_kernel, sums_kernel
from .kernels.statistics import delta_kernel
from .kernels.steps import steps_kernel
from .passes import Pass, Segments, blocks, prepare

ELEMENTS = 512
"""Elements of a state that a program of the elementwise kernels takes at a time."""
NO_STATES = States(None, None)
NO_STATISTICS = Statistics(None, None)


class Side(NamedTuple):
    """Keys or queries, as the origin of states."""

    segments: Segments
    rows: tuple[Tensor, Tensor]
    """k and v, or q and do: a state sums the products of phi of the first with the second"""
    reverse: bool = False
    """True for queries, whose states are those of later tokens"""


class Result(NamedTuple):
    """Arguments of a result that its operands and `Pass` do not imply; see `results_kernel`."""

    segments: Segments
    start: States
    statistics: Statistics = NO_STATISTICS
    normalizer: Tensor | None = None
    x: Tensor | None = None
    products: Tensor | None = None
    reverse: bool = False
    by_boundary: bool = False


def forward(x: Inputs, options: Options) -> Results:
    call = prepare(x, options)
    q, k, v = call.x[:3]
    o = call.output(q, v.shape[3])
    S, z = call.states(call.B)
    normalizer = call.row_sums(q) if options.normalize else q.new_empty(0, dtype=torch.float32)
    keys = call.segments(k.shape[2])
    at_boundaries = sum_states(call, Side(keys, (k, v)), States(call.x.S, call.x.z), States(S, z))
    if options.causal:
        of_o = Result(keys, at_boundaries, normalizer=normalizer, by_boundary=True)
    else:
        of_o = Result(call.segments(q.shape[2]), States(S, z), normalizer=normalizer)
    compute(call, of_o, (q, k, v), o)
    return Results(o, normalizer, S, z)


def backward(given: BackwardCall) -> Gradients:
    (do, *d_end), saved, x, options, (log_decay_needs_grad,) = given
    call = prepare(x, options, log_decay_needs_grad=log_decay_needs_grad)
    q, k, v = call.x[:3]
    do, statistics = as_rows(do), NO_STATISTICS
    if options.normalize:
        statistics = Statistics(saved.normalizer.contiguous(), deltas(call, saved.o, do))
    keys = Side(call.segments(k.shape[2], by_chunk=log_decay_needs_grad), (k, v))
    queries = Side(call.segments(q.shape[2], by_chunk=log_decay_needs_grad), (q, do), reverse=True)
    S, dS = States(call.x.S, call.x.z), States(*map(contiguous, d_end))
    d_start, by_boundary = NO_STATES, options.causal
    if not options.causal or x.S is not None:
        d_start = States(*call.states(call.B))
    if not options.causal:
        end = States(*call.states(call.B))
        sum_states(call, keys, S, end)
        sum_states(call, queries, dS, d_start, statistics)
        S, dS = end, d_start
    elif keys.segments.are_several or log_decay_needs_grad or x.S is not None:
        S = sum_states(call, keys, S)
        dS = sum_states(call, queries, dS, d_start, statistics)
    else:
        by_boundary = False
    dq, dk, dv = (call.output(y, y.shape[3]) for y in (q, k, v))
    of_queries, of_keys = None, None
    if log_decay_needs_grad:
        slices = blocks(q.shape[3], call.tile.slice)
        of_queries, of_keys = call.row_sums(q, slices), call.row_sums(k, slices)
    of_q = Result(queries.segments, S, statistics, x=q, products=of_queries)
    of_v = Result(keys.segments, dS, statistics, reverse=True, by_boundary=by_boundary)
    compute(call, of_q._replace(by_boundary=by_boundary), (do, v, k), dq)
    compute(call, of_v._replace(x=k, products=of_keys), (v, do, q), dk)
    compute(call, of_v, (k, q, do), dv)
    dlog_decay = None
    if of_queries is not None and of_keys is not None:
        dlog_decay = decay_gradient(call, keys.segments, (of_queries, of_keys), (S, dS))
    return Gradients(dq, dk, dv, dlog_decay, *(NO_STATES if x.S is None else d_start))


def steps(x: Inputs, options: Options) -> Tensor:
    """Returns o and overwrites x.S and x.z, which are contiguous, by the final state."""
    call = prepare(x, options)
    q, k, v = call.x[:3]
    S, z = call.x.S, call.x.z
    assert S is not None
    assert z is not None
    o = call.output(q, v.shape[3])
    slices = blocks(v.shape[3], call.state_slice)
    z_end = z if slices == 1 else torch.empty_like(z)
    launch(
        call,
        steps_kernel,
        call.B * call.H_kv * slices,
        *map(rows, (q, k, v, o)),
        call.x.log_decay,
        States(S, z),
        States(S, z_end),
        k.shape[2],
        *call.scalars(call.segments(k.shape[2]))[4:],
        call.heads,
        call.state_sizes,
    )
    if z_end is not z:
        z.copy_(z_end)
    return o


def deltas(call: Pass, o: Tensor, do: Tensor) -> Tensor:
    """Returns do . o of each query."""
    o = as_rows(o)
    delta = call.row_sums(o)
    B, H_q, M = delta.shape
    programs = blocks(M, call.tile.chunk) * H_q * B
    launch(call, delta_kernel, programs, rows(o), rows(do), delta, M, call.heads, call.sizes)
    return delta


def sum_states(
    call: Pass,
    side: Side,
    start: States,
    end: States = NO_STATES,
    statistics: Statistics = NO_STATISTICS,
) -> States:
    """Returns the states at the boundaries; `end`, if given, receives the final ones.

    `start` are the states before the first token, or, of queries, after the last one.
    """
    at, decay = side.segments, call.x.log_decay
    sums = call.states(at.boundaries)
    states = call.states(at.boundaries, call.operand_dtype)
    kept = None if decay is None else decay.new_empty(at.boundaries, call.H_kv)
    scalars = call.scalars(at)
    launch(
        call,
        sums_kernel,
        at.programs * call.H_kv * blocks(side.rows[1].shape[3], call.state_slice),
        *map(rows, side.rows),
        statistics,
        decay,
        call.keys,
        States(*sums),
        kept,
        call.x.cu_seqlens,
        *scalars,
        call.heads,
        call.state_sizes,
        REVERSE=side.reverse,
    )
    for part, to, before, after in zip(sums, states, start, end, strict=True):
        size = part.shape[2:].numel()
        launch(
            call,
            prefix_kernel,
            call.B * call.H_kv * blocks(size, ELEMENTS),
            part,
            to,
            kept,
            before,
            after,
            call.x.cu_seqlens,
            *scalars,
            size,
            call.H_kv,
            REVERSE=side.reverse,
            BLOCK=ELEMENTS,
        )
    return States(*states)


def compute(
    call: Pass, result: Result, operands: tuple[Tensor, Tensor, Tensor], out: Tensor
) -> None:
    """Computes `out` of the operands a, b and c."""
    _, H, _, width = out.shape
    segments = result.segments
    chunks = segments.programs * (segments.tokens // call.tile.chunk)
    launch(
        call,
        results_kernel,
        chunks * H * blocks(width, call.tile.slice),
        *map(rows, operands),
        None if result.x is None else rows(result.x),
        rows(out),
        result.normalizer,
        result.products,
        result.statistics,
        call.x.log_decay,
        call.keys,
        result.start,
        call.x.cu_seqlens,
        *call.scalars(segments),
        call.heads,
        call.sizes,
        REVERSE=result.reverse,
        TRANSPOSED=result.x is not None,
        BY_BOUNDARY=result.by_boundary,
    )


def decay_gradient(
    call: Pass,
    segments: Segments,
    products: tuple[Tensor, Tensor],
    states: tuple[States, States],
) -> Tensor:
    """Returns dlog_decay; `products` are those of queries and keys, `states` are S and dS."""
    decay = call.x.log_decay
    assert decay is not None
    gradient = decay.new_empty(decay.shape)
    if call.is_packed:
        gradient.zero_()  # of the trailing padding
    launch(
        call,
        decay_gradient_kernel,
        segments.programs * call.H_kv,
        gradient,
        decay,
        *products,
        *states,
        call.keys,
        call.x.cu_seqlens,
        *call.scalars(segments),
        products[0].shape[0],
        call.heads,
        call.sizes,
        BLOCK=ELEMENTS,
    )
    return gradient


def launch(call: Pass, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    tile = call.tile
    launch_kernel(kernel, programs, *args, num_warps=tile.warps, num_stages=tile.stages, **options)
