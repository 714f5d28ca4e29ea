"""Every barrier, wait and fence that is taken out of Hopper's kernels is missed by the emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.cuda import mutants
from tests.csrc.cuda.mutants import PACKED, Mutant
from tests.support.emulated import NOT_EMULATED

pytestmark = pytest.mark.exhaustive

if NOT_EMULATED is not None:
    pytest.skip(f"needs the emulator: {NOT_EMULATED}", allow_module_level=True)

KEYS, WORKS, SHORT = ("many-keys",), ("works",), ("short-works",)
CAUSAL, HIDDEN, NO_KEYS = ("causal",), ("lengths-nan",), (f"{PACKED}without-keys",)
QUERIES, BEHIND, WIDE = ("many-queries",), (f"{PACKED}plain",), ("queries-256",)
DROPOUT = ("dropout-queries",)


def _forward(name: str, old: str, new: str, cases: tuple[str, ...]) -> Mutant:
    return _mutant("sm90/forward.cuh", name, old, new, cases)


def _parts(name: str, old: str, new: str, cases: tuple[str, ...]) -> Mutant:
    return _mutant("sm90/backward_parts.cuh", name, old, new, cases)


def _rows(name: str, old: str, new: str, cases: tuple[str, ...], turns: bool = False) -> Mutant:
    return _mutant("sm90/backward_by_rows.cuh", name, old, new, cases, turns)


def _kept(name: str, old: str, new: str) -> Mutant:
    return _mutant("sm90/dropout_mask.cuh", name, old, new, DROPOUT)


def _columns(name: str, old: str, new: str, turns: bool = False) -> Mutant:
    return _mutant("sm90/backward_by_columns.cuh", name, old, new, WIDE, turns, "half-256-256")


def _ring(name: str, old: str, new: str, cases: tuple[str, ...]) -> Mutant:
    return _mutant("sm90/pipeline.cuh", name, old, new, cases)


def _mutant(
    source: str,
    name: str,
    old: str,
    new: str,
    cases: tuple[str, ...],
    turns: bool = False,
    variant: str = "half-64-64",
) -> Mutant:
    """`turns`: in deterministic mode, where blocks of keys add to dq in turn."""
    return Mutant(
        f"{source}: {name}",
        source,
        old,
        new,
        cases,
        variant=variant,
        deterministic=turns,
        chip=90,
    )


_STORE = "    commit_stores();\n    wait_stores_read<0>();\n"
_PUBLISH = "fence_async();\n  group_sync();\n"
_BY_HAND = "  wait_copies<0>();\n  fence_async();\n  __syncwarp();\n"
_DS_THERE = "named_barrier_sync(kAllGroups, kAll);  // ds is there"
_DQ_THERE = "fence_async();\n    named_barrier_sync(kAllGroups, kAll);  // dq is there"

MUTANTS = (
    # What the loader waits for.
    _forward("v is overwritten", "shared.v.wait_empty(at.v);", "", KEYS),
    _forward("q is overwritten", "shared.q.wait_empty(at.q);", "", SHORT),
    _parts("q or do is overwritten", "ring.wait_empty(at);", "", QUERIES),
    _parts("terms are overwritten", "shared.terms.wait_empty(at);", "", QUERIES),
    # What groups wait for.
    _forward("no first k", "shared.k.wait_full(at.k);\n  Note block", "Note block", WORKS),
    _forward("no last v", "shared.v.wait_full(at.v);\n  start_sum", "start_sum", WORKS),
    _rows("no terms", "shared.terms.wait_full(at);", "", QUERIES),
    _rows("no do", "shared.d_o.wait_full(at);", "", QUERIES),
    # What they release.
    _forward(
        "k is kept", "release(shared.k, at.k);\n    finish", "at.k.next();\n    finish", KEYS
    ),
    _forward(
        "v is released before it is read",
        "wait_product<0>(sums.o);\n    release(shared.v, at.v);",
        "release(shared.v, at.v);\n    wait_product<0>(sums.o);",
        KEYS,
    ),
    _forward(
        "q is released before o has left it",
        "write(a, shared, at, work, row, i0, sums);\n"
        "      if (is_first_of_group()) shared.q.release(at.q);",
        "if (is_first_of_group()) shared.q.release(at.q);\n"
        "      write(a, shared, at, work, row, i0, sums);",
        SHORT,
    ),
    _forward("lanes have not read the note", "__syncwarp();  // all lanes", "// all lanes", KEYS),
    _ring("lanes have not read terms", "__syncwarp();  // all lanes", "// all lanes", QUERIES),
    _rows("q is kept", "release(shared.q, at);", "", QUERIES),
    # Products under way.
    _forward("scores are not there", "wait_product<1>(s);", "", KEYS),
    _forward("o is not there", "wait_product<0>(sums.o);\n    release", "release", KEYS),
    _parts("scores are not there", "wait_product<1>(s);", "", QUERIES),
    _parts("do v is not there", "wait_product<0>(dp);", "", QUERIES),
    _rows("gradients are not there", "wait_product<0>(dv);", "", QUERIES),
    _mutant(
        "sm90/gemm.cuh",
        "a sum begins while registers change",
        "b = as_columns(b_tile, 0);\n  wgmma_fence();",
        "b = as_columns(b_tile, 0);",
        KEYS,
    ),
    # o, dk and dv by way of tiles; ds and dq by way of theirs.
    _mutant("sm90/epilogue.cuh", "stores do not see o", _PUBLISH, "group_sync();\n", WORKS),
    _mutant("sm90/epilogue.cuh", "o is stored before all have it", _PUBLISH, "fence_async();\n", WORKS),
    _mutant("sm90/epilogue.cuh", "nobody waits for stores", _STORE, "    commit_stores();\n", WORKS),
    _mutant(
        "sm90/epilogue.cuh",
        "rows behind a packed sequence",
        "to + kGroupRows > result.end",
        "to > result.end",
        NO_KEYS,
    ),
    _mutant(
        "sm90/epilogue.cuh",
        "a warp runs ahead of those that write by hand",
        "    group_sync();\n    return;",
        "    return;",
        NO_KEYS,
    ),
    _rows("products do not see ds", "fence_async();\n    if (is", "if (is", QUERIES),
    _rows("ds is not there", _DS_THERE, "// ds is there", QUERIES),
    _rows("dq before has not left", "if (is_first_of_group()) wait_stores_read<0>();\n    na",
              "na", QUERIES),
    _rows("dq is not there, and ds not read", _DQ_THERE, "fence_async();  //", QUERIES),
    _rows("sums do not see dq", _DQ_THERE, _DQ_THERE.replace("fence_async();", ""), QUERIES),
    # In turn.
    _rows(
        "nobody waits for the turn",
        "while (load_acquire(a.turns + part) != note.turn) {\n    }",
        "",
        KEYS,
        turns=True,
    ),
    _rows("the turn passes before dq is there", "    wait_stores<0>();\n", "", KEYS,
              turns=True),
    # Groups that share keys, and own columns.
    _columns("no q", "shared.q.wait_full(at);", ""),
    _columns("no do", "shared.d_o.wait_full(at);", ""),
    _columns("no v", "shared.v.wait_full(only);", ""),
    _columns("products do not see p", "fence_async();", ""),
    _columns("p and ds are not there", "named_barrier_sync(kAllGroups, kAll);  // p", "// p"),
    _columns("p and ds are overwritten", "second = !second;", ""),
    _columns("gradients are not there", "wait_product<0>(dv);", ""),
    _columns("do is kept", "release(shared.d_o, at);", ""),
    _columns("q is released before it is read", "wait_product<0>(dv);",
             "release(shared.q, at);\n    wait_product<0>(dv);"),
    _columns("nobody waits for the turn", "while (load_acquire(a.turns + part) != note.turn) {\n"
             "      }", "", turns=True),
    _columns("one thread waits for the turn", "      }\n    }\n    group_sync();", "      }\n    }",
             turns=True),
    _columns("the turn passes before dq is there", "__threadfence();\n    group_sync();", "",
             turns=True),
    # Warps that draw for dropout.
    _kept("there is no block of keys", "shared.k.wait_full(only);", ""),
    _kept("there are no terms", "shared.terms.wait_full(terms);", ""),
    _kept("terms are kept", "release(shared.terms, terms);", ""),
    _kept("bits are overwritten", "ring.wait_empty(at);", ""),
    _kept("bits are not there", "ring.wait_full(at);", ""),
    _kept("bits are kept", "release(ring, at);", ""),
    _kept("lanes have not drawn", "__syncwarp();", ""),
    # Notes.
    _forward("the second is the last", "load_k(next, after.index < 0)", "load_k(next, true)", KEYS),
    _forward("all is visible", "block.full, last}", "true, last}", CAUSAL),
    _parts("all is visible", "{block.index, h, block.full,", "{block.index, h, true,", CAUSAL),
    # What nobody sees.
    _forward("values that nobody sees", "!block.full && has_hidden_rows(used, j0, j1)", "false",
             HIDDEN),
    _parts("keys that nobody sees", "const bool hidden = has_hidden_rows(used, j0, packed ? j1 "
              ": min(j1, seq.N));", "const bool hidden = false;", HIDDEN),
    _parts("queries that see nothing", "by_hand = !(", "by_hand = false && !(",
              BEHIND),
    _ring("copies by hand are not there", _BY_HAND, _BY_HAND.replace("wait_copies<0>();", ""),
          HIDDEN),
    _ring("products do not see copies by hand", _BY_HAND, _BY_HAND.replace("fence_async();", ""),
          HIDDEN),
    # Barriers begin.
    _forward("TMA does not see barriers", "fence_mbarrier_init();", "", WORKS),
    _mutant("sm90/backward.cuh", "barriers are not there", "  }\n  __syncthreads();", "  }", QUERIES),
    _forward(
        "too few readers of k", "k.init(kTile.consumers * kGroupWarps)", "k.init(kTile.consumers)", KEYS
    ),
    _ring("rounds are not told apart", "if (stage == 0) parity ^= 1;", "", KEYS),
    # Turns are for speed, but must not stop anybody.
    _forward("nobody passes the turn", "turns.pass();", "", KEYS),
)  # fmt: skip


def test_unchanged_kernels_are_right(tmp_path: Path) -> None:
    line = "shared.q.wait_full(at.q);"
    cases = (*KEYS, *WORKS, *NO_KEYS, *HIDDEN, *QUERIES, *BEHIND, *DROPOUT)
    same = _forward("unchanged", line, line, cases)
    mutants.assert_right(same, tmp_path)


def test_unchanged_kernels_of_wide_rows_are_right(tmp_path: Path) -> None:
    line = "shared.q.wait_full(at);"
    mutants.assert_right(_columns("unchanged", line, line), tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_noticed_under_every_schedule(mutant: Mutant, tmp_path: Path) -> None:
    mutants.assert_noticed(mutant, tmp_path)
