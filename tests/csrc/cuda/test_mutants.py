"""Mutation tests: the emulator reports every barrier or wait removed from the sm80 kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.cuda import mutants
from tests.csrc.cuda.mutants import DECODING, PACKED, Mutant
from tests.support.emulated import NOT_EMULATED

pytestmark = pytest.mark.exhaustive

if NOT_EMULATED is not None:
    pytest.skip(f"needs the emulator: {NOT_EMULATED}", allow_module_level=True)

FORWARD, BACKWARD, GQA, BIAS = ("many-keys",), ("many-queries",), ("gqa",), ("bias-hides",)
RELATIVE, RELATIVE_ALL = ("relative-shared",), ("relative-all",)
RELATIVE_PACKED = (f"{PACKED}relative-end",)
KEYS, KEYS_SHARED, KEYS_WINDOW = ("keys-all",), ("keys-shared",), ("keys-window",)
KEYS_UNIT = "relative-half-64"
DECODE, DECODE_MANY = (f"{DECODING}long",), (f"{DECODING}group-8-queries-17",)


def _without(
    source: str,
    text: str,
    cases: tuple[str, ...],
    why: str = "",
    *,
    in_float32: bool = False,
    deterministic: bool = False,
    variant: str = "half-32",
) -> Mutant:
    """A mutant without `text`, which the source has once, followed by the comment `why`.

    Float32 kernels have one stage of q and do, 16-bit kernels two.
    """
    old = f"{text}{f'  // {why}' if why else ''}\n"
    dtype, variant = ("float32", "float-32") if in_float32 else ("float16", variant)
    return Mutant(
        f"{source}: no {why or text}", source, old, "\n", cases, dtype, variant, deterministic
    )


WAIT, BARRIER = "wait_copies<0>();", "__syncthreads();"
MUTANTS = (
    _without("sm80/forward.cuh", BARRIER, FORWARD, "k has arrived; the previous v has been read"),
    _without("sm80/forward.cuh", BARRIER, FORWARD, "v has arrived; k has been read"),
    Mutant(
        "forward.cuh: no wait for k",
        "sm80/forward.cuh",
        f"{WAIT}\n    {BARRIER}  // k",
        f"{BARRIER}  // k",
        FORWARD,
    ),
    Mutant(
        "forward.cuh: no wait for v",
        "sm80/forward.cuh",
        f"{WAIT}\n    {BARRIER}  // v",
        f"{BARRIER}  // v",
        FORWARD,
    ),
    _without(
        "sm80/backward.cuh",
        BARRIER,
        BACKWARD,
        "q and do have arrived; p, ds and the other stage have been read",
    ),
    _without("sm80/backward.cuh", BARRIER, BACKWARD, "p and ds are written"),
    _without(
        "sm80/backward.cuh",
        "    Tile::template clear<kBlockM * kWidth>(a.dq_sums + tile * (kBlockM * kWidth));",
        BACKWARD,
    ),
    _without(
        "sm80/backward.cuh",
        "    if (threadIdx.x == 0 && a.dq_semaphore) a.dq_semaphore[tile] = 0;",
        BACKWARD,
        deterministic=True,
    ),
    _without(
        "sm80/backward.cuh",
        "  if (program == 0 && threadIdx.x == 0 && a.dq_semaphore) *a.block_counter = 0;",
        BACKWARD,
        deterministic=True,
    ),
    _without("sm80/backward.cuh", WAIT, BACKWARD),
    _without("sm80/backward.cuh", BARRIER, BACKWARD, "q and do have been read", in_float32=True),
    _without(
        "sm80/backward.cuh",
        f"if (kStages == 1) {BARRIER}",
        GQA,
        "the tiles of the previous head have been read",
        in_float32=True,
    ),
    _without(
        "common/score_gradient.cuh",
        BARRIER,
        GQA,
        "all threads have read the index",
        deterministic=True,
    ),
    _without("sm80/tile_gradients.cuh", BARRIER, BIAS, "the previous tiles have been read"),
    _without("sm80/tile_gradients.cuh", WAIT, BIAS),
    _without("sm80/tile_gradients.cuh", BARRIER, BIAS, "the operands have arrived"),
    _without(
        "sm80/relative_gradient.cuh",
        BARRIER,
        RELATIVE,
        "the last tiles have been read, and may be overwritten",
    ),
    _without("sm80/relative_gradient.cuh", BARRIER, RELATIVE, "ds is written"),
    Mutant(
        "relative_gradient.cuh: diagonals off by one",
        "sm80/relative_gradient.cuh",
        "n - first - (kBlockN - 1)",
        "n - first - kBlockN",
        RELATIVE,
    ),
    Mutant(
        "relative_gradient.cuh: a strip begins before the first query",
        "sm80/relative_gradient.cuh",
        "ceil_divide(max(-diagonal, 0), kBlockN)",
        "max(-diagonal, 0) / kBlockN",
        RELATIVE_ALL,
    ),
    Mutant(
        "relative_gradient.cuh: a strip ends one tile early",
        "sm80/relative_gradient.cuh",
        "ceil_divide(clamp_diagonal(key_end), kBlockN)",
        "clamp_diagonal(key_end) / kBlockN",
        RELATIVE,
    ),
    Mutant(
        "relative_gradient.cuh: sums of sequences with different offsets",
        "sm80/relative_gradient.cuh",
        "if (first >= 0 && first != strip.first)",
        "if (first > kBlockM)",
        RELATIVE_PACKED,
    ),
    Mutant(
        "relative_gradient.cuh: one of the heads that share a table",
        "sm80/relative_gradient.cuh",
        "table + static_cast<int>(n % heads)",
        "table",
        RELATIVE,
    ),
    Mutant(
        "relative_gradient.cuh: the first group of sequences and heads only",
        "sm80/relative_gradient.cuh",
        "group < a.groups; ++group",
        "group < 1; ++group",
        RELATIVE,
    ),
    Mutant(
        "relative_gradient.cuh: bands before the last one",
        "sm80/relative_gradient.cuh",
        "band <= last_band",
        "band < last_band",
        RELATIVE,
    ),
    *(
        _without("sm80/relative_tiles.cuh", BARRIER, KEYS, why, variant=KEYS_UNIT)
        for why in (
            "the previous tile has been read",
            "q, k and the band have arrived",
            "the band has been read",
            "v and do have arrived",
        )
    ),
    *(
        _without("sm80/relative_backward.cuh", BARRIER, KEYS, why, variant=KEYS_UNIT)
        for why in (
            "p and ds are written",
            "v and do have been read",
            "the band has arrived; ds is written",
            "ds is written",
        )
    ),
    _without(
        "sm80/relative_keys.cuh",
        "__syncwarp();",
        KEYS,
        "the products are written",
        variant=KEYS_UNIT,
    ),
    *(
        Mutant(f"{source}: {name}", source, old, new, cases, variant=KEYS_UNIT)
        for name, source, old, new, cases in (
            (
                "a band one distance too far",
                "sm80/relative_keys.cuh",
                "keys.offset - (kBlockN - 1)",
                "keys.offset - kBlockN",
                KEYS,
            ),
            (
                "distances that the diagonals hide",
                "sm80/relative_keys.cuh",
                "min(offset - s.low + 1, p.score.distances)",
                "min(offset - s.low, p.score.distances)",
                KEYS_WINDOW,
            ),
            (
                "the corners of ds by distance are not 0",
                "sm80/relative_tiles.cuh",
                "*tile.at(i, (c + kBlock) % (2 * kBlock)) = Element{};",
                "",
                KEYS,
            ),
            (
                "sums of one of the heads that share keys",
                "sm80/relative_backward.cuh",
                "table + static_cast<int>(n % heads)",
                "table",
                KEYS_SHARED,
            ),
        )
    ),
    _without(
        "sm80/decode.cuh",
        f"if (!alone || n == 0) {BARRIER}",
        DECODE_MANY,
        "q and k have arrived; the previous v has been read",
    ),
    _without(
        "sm80/decode.cuh",
        f"if (!alone) {BARRIER}",
        DECODE_MANY,
        "v has arrived; k has been read",
    ),
    Mutant(
        "decode.cuh: no wait for q",
        "sm80/decode.cuh",
        "if (!alone || n == 0) __syncthreads();",
        "if (!alone) __syncthreads();",
        DECODE,
    ),
    Mutant(
        "decode.cuh: no wait for k",
        "sm80/decode.cuh",
        "wait_copies<2>();\n    __syncwarp();\n    if (!alone ||",
        "__syncwarp();\n    if (!alone ||",
        DECODE,
    ),
    Mutant(
        "decode.cuh: too short a wait for k",
        "sm80/decode.cuh",
        "wait_copies<2>();\n    __syncwarp();\n    if (!alone ||",
        "wait_copies<3>();\n    __syncwarp();\n    if (!alone ||",
        DECODE,
    ),
    Mutant(
        "decode.cuh: too short a wait for v",
        "sm80/decode.cuh",
        "wait_copies<2>();\n    __syncwarp();\n    if (!alone)",
        "wait_copies<3>();\n    __syncwarp();\n    if (!alone)",
        DECODE,
    ),
    Mutant(
        "decode.cuh: a warp's lanes do not wait for each other's k",
        "sm80/decode.cuh",
        "__syncwarp();\n    if (!alone ||",
        "if (!alone ||",
        DECODE,
    ),
    Mutant(
        "decode.cuh: a warp's lanes do not wait for each other's v",
        "sm80/decode.cuh",
        "__syncwarp();\n    if (!alone)",
        "if (!alone)",
        DECODE,
    ),
    _without("sm80/decode.cuh", BARRIER, DECODE, "all tiles have been read"),
    _without("sm80/decode.cuh", BARRIER, DECODE, "all sums are written"),
    _without("sm80/decode.cuh", BARRIER, DECODE, "the sums have been read"),
    _without("sm80/decode_combine.cuh", BARRIER, DECODE, "the sums of all warps are written"),
    Mutant(
        "forward.cuh: rows after the last query",
        "sm80/forward.cuh",
        "return i < seq.M; });",
        "return i >= 0; });",
        FORWARD,
    ),
    Mutant(
        "decode.cuh: rows after the last query",
        "sm80/decode.cuh",
        "return at.valid ? q.at(s.b, at.i)",
        "return at.h >= 0 ? q.at(s.b, at.i)",
        DECODE,
    ),
    Mutant(
        "decode.cuh: dead keys are copied with live ones",
        "sm80/decode.cuh",
        "pages.are_live(j0, kShare)",
        "true",
        DECODE,
    ),
    Mutant(
        "decode.cuh: copied rows are too close",
        "sm80/decode.cuh",
        "from += kStep * stride;",
        "from += stride;",
        DECODE,
    ),
    Mutant(
        "softmax.cuh: sum over half of a row",
        "common/softmax.cuh",
        "return x + __shfl_xor_sync(~0u, x, 2);",
        "return x;",
        FORWARD,
    ),
    Mutant(
        "shared_tile.cuh: an address one row too far",
        "common/shared_tile.cuh",
        "(columns / kPanel * kRows + rows)",
        "(columns / kPanel * kRows + rows + 1)",
        FORWARD,
    ),
)


def test_unchanged_kernels_are_right(tmp_path: Path) -> None:
    line, cases = (
        "Block block = iterator.next();",
        (
            *(*FORWARD, *BACKWARD, *GQA, *BIAS, *RELATIVE, *RELATIVE_ALL, *RELATIVE_PACKED),
            *(*DECODE, *DECODE_MANY, *KEYS, *KEYS_SHARED, *KEYS_WINDOW),
        ),
    )
    same = Mutant("unchanged", "sm80/forward.cuh", line, line, cases)
    mutants.assert_right(same, tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_noticed_under_every_schedule(mutant: Mutant, tmp_path: Path) -> None:
    mutants.assert_noticed(mutant, tmp_path)
