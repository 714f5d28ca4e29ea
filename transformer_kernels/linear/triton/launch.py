"""Host side of linear attention: the launches of a forward pass, of a backward pass and of steps.

docs/linear.md, section 6, explains segments, boundaries and the four scans.
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
from .kernels.scan import scan_kernel
from .kernels.states import prefix_kernel, sums_kernel
from .kernels.statistics import delta_kernel
from .kernels.steps import steps_kernel
from .passes import Pass, Segments, blocks, prepare

ELEMENTS = 1024
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


class Scan(NamedTuple):
    """Arguments of a scan that its operands and `Pass` do not imply; see `scan_kernel`."""

    segments: Segments
    start: States
    statistics: Statistics = NO_STATISTICS
    end: States = NO_STATES
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
    keys, start, end = call.segments(k.shape[2]), States(call.x.S, call.x.z), States(S, z)
    if options.causal:
        by_boundary = keys.are_several
        if by_boundary:
            start = sum_states(call, Side(keys, (k, v)), start)
        for_o = Scan(keys, start, end=end, normalizer=normalizer, by_boundary=by_boundary)
    else:
        sum_states(call, Side(keys, (k, v)), start, end=end)
        for_o = Scan(call.segments(q.shape[2]), end, normalizer=normalizer)
    scan(call, for_o, (q, k, v), o)
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
    d_start = States(*call.states(call.B))
    by_boundary = options.causal and (keys.segments.are_several or log_decay_needs_grad)
    if by_boundary:
        S, dS = sum_states(call, keys, S), sum_states(call, queries, dS, statistics)
    elif not options.causal:
        S = sum_states(call, keys, S, end=States(*call.states(call.B)))
        dS = sum_states(call, queries, dS, statistics, end=d_start)
    dq, dk, dv = (call.output(y, y.shape[3]) for y in (q, k, v))
    of_queries, of_keys = None, None
    if log_decay_needs_grad:
        slices = blocks(q.shape[3], call.tile.slice)
        of_queries, of_keys = call.row_sums(q, slices), call.row_sums(k, slices)
    for_q = Scan(queries.segments, S, statistics, x=q, products=of_queries, by_boundary=by_boundary)
    for_v = Scan(keys.segments, dS, statistics, reverse=True, by_boundary=by_boundary)
    for_k = for_v._replace(x=k, products=of_keys)
    if options.causal and x.S is not None:  # not causal: the sums are the gradients
        for_k = for_k._replace(end=States(None, d_start.z))
        for_v = for_v._replace(end=States(d_start.S, None))
    scan(call, for_q, (do, v, k), dq)
    scan(call, for_k, (v, do, q), dk)
    scan(call, for_v, (k, q, do), dv)
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
    slices = blocks(v.shape[3], call.tile.slice)
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
        call.sizes,
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
    statistics: Statistics = NO_STATISTICS,
    *,
    end: States = NO_STATES,
) -> States:
    """Returns the states at the boundaries; or `end`, if given, which receives the final ones.

    `start` are the states before the first token, or, of queries, after the last one.
    """
    at, decay = side.segments, call.x.log_decay
    states = call.states(at.boundaries)
    kept = None if decay is None else decay.new_empty(at.boundaries, call.H_kv)
    scalars = call.scalars(at)
    launch(
        call,
        sums_kernel,
        at.programs * call.H_kv * blocks(side.rows[1].shape[3], call.tile.slice),
        *map(rows, side.rows),
        statistics,
        decay,
        call.keys,
        States(*states),
        kept,
        call.x.cu_seqlens,
        *scalars,
        call.heads,
        call.sizes,
        REVERSE=side.reverse,
    )
    for part, before, after in zip(states, start, end, strict=True):
        size = part.shape[2:].numel()
        launch(
            call,
            prefix_kernel,
            call.B * call.H_kv * blocks(size, ELEMENTS),
            part,
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
    return States(*states) if end is NO_STATES else end


def scan(call: Pass, options: Scan, operands: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
    """Computes `out` of the operands a, b and c."""
    _, H, _, width = out.shape
    launch(
        call,
        scan_kernel,
        options.segments.programs * H * blocks(width, call.tile.slice),
        *map(rows, operands),
        None if options.x is None else rows(options.x),
        rows(out),
        options.normalizer,
        options.products,
        options.statistics,
        call.x.log_decay,
        call.keys,
        options.start,
        options.end,
        call.x.cu_seqlens,
        *call.scalars(options.segments),
        call.heads,
        call.sizes,
        REVERSE=options.reverse,
        TRANSPOSED=options.x is not None,
        BY_BOUNDARY=options.by_boundary,
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
