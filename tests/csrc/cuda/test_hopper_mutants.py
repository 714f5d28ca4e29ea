"""Mutation tests of the Hopper kernels: no removed barrier, wait or fence goes undetected."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.csrc.cuda import mutants
from tests.csrc.cuda.mutants import PACKED, Mutant
from tests.support.emulated import NOT_EMULATED

pytestmark = pytest.mark.exhaustive

if NOT_EMULATED is not None:
    pytest.skip(f"needs the emulator: {NOT_EMULATED}", allow_module_level=True)

KEYS, TILES, SHORT_TILES = ("many-keys",), ("many-tiles",), ("many-short-tiles",)
CAUSAL, DEAD_KEYS, NO_KEYS = ("causal",), ("lengths-nan",), (f"{PACKED}without-keys",)
QUERIES, VARLEN, WIDE = ("many-queries",), (f"{PACKED}plain",), ("queries-256",)
DROPOUT, WIDE_TILES, HALVES = ("dropout-queries",), ("many-tiles-128",), ("queries-192",)


def _mutant(
    source: str,
    name: str,
    old: str,
    new: str,
    cases: tuple[str, ...],
    deterministic: bool = False,
    variant: str = "half-64-64",
) -> Mutant:
    return Mutant(
        f"{source}: {name}",
        source,
        old,
        new,
        cases,
        variant=variant,
        deterministic=deterministic,
        chip=90,
    )


_producer = partial(_mutant, "sm90/forward_producer.cuh")
_consumer = partial(_mutant, "sm90/forward_consumer.cuh")
_parts = partial(_mutant, "sm90/backward_parts.cuh")
_rows = partial(_mutant, "sm90/backward_by_rows.cuh")


def _overlap(name: str, old: str, new: str) -> Mutant:
    """A mutant at width 128, where the tiles of a consumer overlap."""
    source = "sm90/forward_consumer.cuh"
    return _mutant(source, name, old, new, WIDE_TILES, variant="half-128-128")


def _preprocess(name: str, old: str, new: str = "", *, deterministic: bool = False) -> Mutant:
    return _mutant("sm90/backward_preprocess.cuh", name, old, new, KEYS, deterministic)


def _dropout(name: str, old: str, new: str) -> Mutant:
    return _mutant("sm90/dropout_mask.cuh", name, old, new, DROPOUT)


def _columns(name: str, old: str, new: str, deterministic: bool = False) -> Mutant:
    source = "sm90/backward_by_columns.cuh"
    return _mutant(source, name, old, new, WIDE, deterministic, "half-256-256")


def _halves(name: str, old: str, new: str, *, deterministic: bool = False) -> Mutant:
    source = "sm90/backward_by_halves.cuh"
    return _mutant(source, name, old, new, HALVES, deterministic, "half-192-128")


def _adding(name: str, old: str, new: str) -> Mutant:
    return _mutant("sm90/backward_parts.cuh", name, old, new, WIDE, True, "half-256-256")


def _pipeline(name: str, old: str, new: str, cases: tuple[str, ...]) -> Mutant:
    return _mutant("sm90/pipeline.cuh", name, old, new, cases)


_PUBLISH = "fence_async();\n  consumer_sync();\n"
_LIVE_ROWS = "  wait_copies<0>();\n  fence_async();\n  __syncwarp();\n"
_DS_COMPLETE = "named_barrier_sync(kAllConsumersBarrier, kAll);  // ds is complete"
_DQ_STORED = "    fence_async();\n    __syncwarp();  // all lanes have stored their dq"
_WAIT_V = "shared.v.wait_full(kv_state);"
_WAIT_STATISTICS = "shared.row_stats.wait_full(state);"
_NEXT_K = "shared_.k.wait_full(state_.k);\n    ping_pong_"

MUTANTS = (
    # Waits of the producer.
    _producer(
        "v is overwritten",
        "shared_.v.wait_empty(state_.v);\n    if (elect",
        "if (elect",
        KEYS,
    ),
    _producer(
        "q is overwritten",
        "tile.any_keys = any_keys;\n    shared_.q.wait_empty(state_.q);",
        "tile.any_keys = any_keys;",
        SHORT_TILES,
    ),
    _producer(
        "a tile is replaced by the end of the tiles",
        "load_pending_values();\n    shared_.q.wait_empty(state_.q);",
        "load_pending_values();",
        SHORT_TILES,
    ),
    _producer(
        "the end of the tiles is not announced",
        "      shared_.q.tile_info(state_.q) = WorkTile::none();",
        "",
        SHORT_TILES,
    ),
    _producer(
        "the last values of a tile are not loaded",
        "    if (any_keys) load_k(block, next.index < 0);\n    load_pending_values();",
        "    if (any_keys) load_k(block, next.index < 0);",
        TILES,
    ),
    _producer(
        "the last values of all tiles are not loaded",
        "    load_pending_values();\n    shared_.q.wait_empty",
        "    shared_.q.wait_empty",
        TILES,
    ),
    _parts("q or do is overwritten", "pipeline.wait_empty(state);", "", QUERIES),
    _parts("row statistics are overwritten", "shared.row_stats.wait_empty(state);", "", QUERIES),
    # Waits of the consumers.
    _consumer(
        "no wait for the first k",
        "shared_.k.wait_full(state_.k);\n    start_scores();",
        "start_scores();",
        TILES,
    ),
    _consumer(
        "no wait for the last v",
        "shared_.v.wait_full(state_.v);\n      if (kOverlapsTiles)",
        "if (kOverlapsTiles)",
        TILES,
    ),
    _overlap("no wait for the next q", "if (kOverlapsTiles) shared_.q.wait_full(state_.q);", ""),
    _overlap("no wait for the first k of the next tile", _NEXT_K, "ping_pong_"),
    _parts("no wait for row statistics", _WAIT_STATISTICS, "", QUERIES),
    _rows("no wait for do", "shared.d_o.wait_full(state);", "", QUERIES),
    # Releases by the consumers.
    _consumer(
        "k is never released",
        "release_k();\n      finish",
        "state_.k.next();\n      finish",
        KEYS,
    ),
    _consumer(
        "v is released before it is read",
        "wait_gemm<0>(o_);\n      release_v();",
        "release_v();\n      wait_gemm<0>(o_);",
        KEYS,
    ),
    _overlap(
        "the last v is never released",
        "wait_gemm<1>(o_);\n    release_v();",
        "wait_gemm<1>(o_);\n    state_.v.next();",
    ),
    _consumer("q is released while o is stored", "wait_stores_read<0>();", "", SHORT_TILES),
    _consumer(
        "the CTA ends while o is stored",
        "    }\n    release_stored();",
        "    }",
        TILES,
    ),
    _consumer("q is never released", "shared_.q.release(stored_);", "", SHORT_TILES),
    _pipeline(
        "k is released before all lanes have read its TileInfo",
        "__syncwarp();  // all lanes",
        "// all lanes",
        KEYS,
    ),
    _pipeline(
        "row statistics are released before all lanes have read them",
        "__syncwarp();  // all lanes",
        "// all lanes",
        QUERIES,
    ),
    _rows("q is never released", "release(shared.q, state);", "", QUERIES),
    # Matrix products in flight.
    _consumer("no wait for the scores", "wait_gemm<1>(s_);", "", KEYS),
    _consumer("no wait for o", "wait_gemm<0>(o_);\n      release", "release", KEYS),
    _overlap("no wait for o of the last key block", "wait_gemm<1>(o_);", ""),
    _overlap(
        "no wait for the scores of the next tile",
        "store_output(position);\n    wait_gemm<0>(s_);",
        "store_output(position);",
    ),
    _parts("no wait for the scores", "wait_gemm<1>(s);", "", QUERIES),
    _parts("no wait for do v", "wait_gemm<kPending>(dp);", "", QUERIES),
    _parts(
        "no wait for do v before score options",
        "wait_gemm<0>(dp);\n      subtract",
        "subtract",
        ("softcap",),
    ),
    _rows("no wait for dq", "wait_gemm<1>(dq);", "", QUERIES),
    _rows("no wait for dk", "wait_gemm<0>(dk);", "", QUERIES),
    _mutant(
        "sm90/gemm.cuh",
        "a product starts while registers change",
        "mn_major_step<TileB>(b_row));\n  wgmma_fence();",
        "mn_major_step<TileB>(b_row));",
        KEYS,
    ),
    # o, dk and dv staged in shared memory; ds and dq in theirs.
    _mutant("sm90/epilogue.cuh", "o is not visible to TMA", _PUBLISH, "consumer_sync();\n", TILES),
    _mutant(
        "sm90/epilogue.cuh",
        "o is stored before all warps have staged it",
        _PUBLISH,
        "fence_async();\n",
        TILES,
    ),
    _parts("the CTA ends while dk and dv are stored", "wait_stores_read<0>();", "", QUERIES),
    _mutant(
        "sm90/epilogue.cuh",
        "rows of the next varlen sequence are overwritten",
        "output_row + kWarpgroupRows > output.end",
        "output_row > output.end",
        NO_KEYS,
    ),
    _mutant(
        "sm90/epilogue.cuh",
        "a warp runs ahead of those that store from registers",
        "    consumer_sync();\n    return;",
        "    return;",
        NO_KEYS,
    ),
    _rows("ds is not visible to wgmma", "fence_async();\n    if (elect", "if (elect", QUERIES),
    _rows("ds is incomplete", _DS_COMPLETE, "// ds is complete", QUERIES),
    _rows(
        "the previous dq has not been read",
        "if (elect_one()) wait_stores_read<0>();\n    na",
        "na",
        QUERIES,
    ),
    _rows("ds is overwritten", "second_buffer = !second_buffer;", "", QUERIES),
    _rows(
        "k is overwritten while the other consumer reads it",
        "  named_barrier_sync(kAllConsumersBarrier, kAll);\n\n  epilogue",
        "  epilogue",
        QUERIES,
    ),
    _rows(
        "dq is not visible to TMA",
        _DQ_STORED,
        _DQ_STORED.replace("    fence_async();\n", ""),
        QUERIES,
    ),
    _rows("dq of the last tile is not added", "  add_previous_dq();\n  //", "  //", QUERIES),
    _rows(
        "dq is added to the sums of the next tile",
        "while (!last) {\n",
        "while (!last) {\n    if (dq_info.tile >= 0) ++dq_info.tile;\n",
        QUERIES,
    ),
    # Sums and counters that must be 0.
    _mutant(
        "sm90/launches.cuh",
        "the counter of tiles is not cleared",
        "if (taken) TK_LAUNCH(clear_kernel",
        "if (false) TK_LAUNCH(clear_kernel",
        (*VARLEN, *DEAD_KEYS),
    ),
    _preprocess(
        "sums of dq are not cleared",
        "Tile::template clear<kDqParts * kDqElements>(a.dq_sums + tile * kDqParts * kDqElements);",
    ),
    _preprocess(
        "the dq semaphore of one warp is not cleared",
        "threadIdx.x < kDqParts && a.dq_semaphore",
        "threadIdx.x < kDqParts - 1 && a.dq_semaphore",
        deterministic=True,
    ),
    _preprocess(
        "the counter of CTAs is not cleared", "*a.block_counter = 0;", ";", deterministic=True
    ),
    # The dq semaphore of deterministic mode.
    _rows(
        "no wait for the dq semaphore",
        "while (load_acquire(a.dq_semaphore + part) != info.preceding_blocks()) {\n    }",
        "",
        KEYS,
        deterministic=True,
    ),
    _rows(
        "the dq semaphore is released before dq is complete",
        "    wait_stores<0>();\n",
        "",
        KEYS,
        deterministic=True,
    ),
    # Widths above 128: consumers share keys and own columns.
    _columns("no wait for q", "shared.q.wait_full(state);", ""),
    _columns("no wait for do", "shared.d_o.wait_full(state);", ""),
    _parts("no wait for v at width 256", _WAIT_V, "", WIDE, variant="half-256-256"),
    _columns("p is not visible to wgmma", "fence_async();", ""),
    _columns(
        "p and ds are incomplete", "named_barrier_sync(kAllConsumersBarrier, kAll);  // p", "// p"
    ),
    _columns("p and ds are overwritten", "second_buffer = !second_buffer;", ""),
    _columns("no wait for the gradients", "wait_gemm<0>(dv);", ""),
    _columns("do is never released", "release(shared.d_o, state);", ""),
    _columns(
        "q is released before it is read",
        "wait_gemm<0>(dv);",
        "release(shared.q, state);\n    wait_gemm<0>(dv);",
    ),
    # Additions to dq from registers, at widths above 128.
    _adding(
        "no wait for the dq semaphore",
        "while (load_acquire(a.dq_semaphore + part) != turn) {\n      }",
        "",
    ),
    _adding(
        "only one thread waits for the dq semaphore",
        "      }\n    }\n    __syncwarp();",
        "      }\n    }",
    ),
    _adding(
        "the dq semaphore is released before dq is complete",
        "__threadfence();\n    __syncwarp();",
        "",
    ),
    # Width 192: scores in halves, dq by panels.
    _halves("no wait for q", "shared.q.wait_full(state);", ""),
    _halves("no wait for do", "shared.d_o.wait_full(state);", ""),
    _parts("no wait for v at width 192", _WAIT_V, "", HALVES, variant="half-192-128"),
    _parts(
        "no wait for row statistics at width 192",
        _WAIT_STATISTICS,
        "",
        HALVES,
        variant="half-192-128",
    ),
    _halves("ds is not visible to wgmma", "    fence_async();\n", ""),
    _halves("ds is incomplete", _DS_COMPLETE, "// ds is complete"),
    _halves("ds is overwritten", "second_buffer = !second_buffer;", ""),
    _halves("no wait for dq", "wait_gemm<1>(dq);", ""),
    _halves("no wait for dk and the last panel of dq", "wait_gemm<0>(dq);", ""),
    _halves("do is never released", "release(shared.d_o, state);", ""),
    _halves("q is never released", "release(shared.q, state);", ""),
    _halves(
        "q is released before dk has read it",
        "wait_gemm<0>(dq);",
        "release(shared.q, state);\n    wait_gemm<0>(dq);",
    ),
    _halves(
        "both halves have the same statistics",
        "shared.row_stats.tile(state), query, j0",
        "shared.row_stats.tile(state), 0, j0",
    ),
    _halves(
        "dv has the first half of do twice",
        "start_gemm_nn(dv, weights, d_o, query);",
        "start_gemm_nn(dv, weights, d_o, 0);",
    ),
    _halves(
        "the last panel of dq has the keys of the first consumer twice",
        "kDqColumns, row);",
        "kDqColumns, 0);",
    ),
    _halves(
        "k is overwritten while the other consumer reads it",
        "  named_barrier_sync(kAllConsumersBarrier, kAll);\n  epilogue",
        "  epilogue",
    ),
    _halves(
        "both consumers add to the last panel in the same turn",
        "info.preceding_blocks() * Shape::kConsumers + consumer",
        "info.preceding_blocks() * Shape::kConsumers",
        deterministic=True,
    ),
    # Warps that generate the dropout mask.
    _dropout("no wait for the key block", "shared.k.wait_full(kv_state);", ""),
    _dropout("no wait for row statistics", "shared.row_stats.wait_full(stats_state);", ""),
    _dropout("row statistics are never released", "release(shared.row_stats, stats_state);", ""),
    _dropout("bits are overwritten", "pipeline.wait_empty(state);", ""),
    _dropout("no wait for the bits", "pipeline.wait_full(state);", ""),
    _dropout("bits are never released", "pipeline.release(state);", ""),
    _dropout(
        "bits are published before all lanes have written",
        "mbarrier_arrive(pipeline.full(state));",
        "for (int n = 0; n < 32 && !lane_index(); ++n) mbarrier_arrive(pipeline.full(state));",
    ),
    _dropout("bits are released by one warp", "Shape::kConsumers * kWarpgroupThreads", "kWarp"),
    # TileInfo.
    _producer(
        "the second key block is marked last",
        "load_k(next, after.index < 0)",
        "load_k(next, true)",
        KEYS,
    ),
    _producer("every block is marked fully visible", "block.full, last}", "true, last}", CAUSAL),
    _parts(
        "every block is marked fully visible",
        "info(block.index, h, block.full,",
        "info(block.index, h, true,",
        CAUSAL,
    ),
    # Dead keys and fully masked queries, which may hold NaN.
    _producer(
        "values of dead keys are loaded",
        "block.full || !has_dead_rows(live_keys, j0, j1)",
        "true",
        DEAD_KEYS,
    ),
    _parts(
        "dead keys are loaded",
        "const bool has_dead_keys = has_dead_rows(live_keys, j0, is_varlen ? j1 : min(j1, seq.N));",
        "const bool has_dead_keys = false;",
        DEAD_KEYS,
    ),
    _parts(
        "fully masked queries are loaded",
        "zero_dead_rows =\n        !(",
        "zero_dead_rows =\n        false && !(",
        VARLEN,
    ),
    _pipeline(
        "no wait for copies of live rows",
        _LIVE_ROWS,
        _LIVE_ROWS.replace("wait_copies<0>();", ""),
        DEAD_KEYS,
    ),
    _pipeline(
        "copies of live rows are not visible to wgmma",
        _LIVE_ROWS,
        _LIVE_ROWS.replace("fence_async();", ""),
        DEAD_KEYS,
    ),
    # Initialisation of the mbarriers.
    _mutant(
        "sm90/forward.cuh",
        "mbarriers are not visible to TMA",
        "fence_mbarrier_init();",
        "",
        TILES,
    ),
    _mutant(
        "sm90/backward.cuh",
        "mbarriers are used before their initialisation",
        "  }\n  __syncthreads();",
        "  }",
        QUERIES,
    ),
    _mutant(
        "sm90/forward.cuh",
        "too few releases of k expected",
        "k.init(kTile.consumers * kWarpgroupWarps)",
        "k.init(kTile.consumers)",
        KEYS,
    ),
    _pipeline("the parity never flips", "if (stage == 0) parity ^= 1;", "", KEYS),
    # Ping-pong order affects speed only, but must not deadlock.
    _consumer(
        "the next consumer is never signalled",
        "start_output();\n      ping_pong_.signal_next();",
        "start_output();",
        KEYS,
    ),
    _overlap(
        "the next consumer is not signalled at the end of a tile",
        "start_scores();\n    ping_pong_.signal_next();",
        "start_scores();",
    ),
)


def test_unmodified_kernels_pass(tmp_path: Path) -> None:
    line = "fence_mbarrier_init();"
    cases = (*KEYS, *TILES, *NO_KEYS, *DEAD_KEYS, *QUERIES, *VARLEN, *DROPOUT)
    same = _mutant("sm90/forward.cuh", "unchanged", line, line, cases)
    mutants.assert_right(same, tmp_path)


def test_unmodified_kernels_with_overlapping_tiles_pass(tmp_path: Path) -> None:
    mutants.assert_right(_overlap("unchanged", _NEXT_K, _NEXT_K), tmp_path)


def test_unmodified_kernels_of_wide_rows_pass(tmp_path: Path) -> None:
    line = "shared.q.wait_full(state);"
    mutants.assert_right(_columns("unchanged", line, line), tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_detected_under_every_schedule(mutant: Mutant, tmp_path: Path) -> None:
    mutants.assert_noticed(mutant, tmp_path)
