"""Every barrier and every wait that is taken out of the kernels is missed by the emulator."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cuda import mutants
from tests.cuda.mutants import Mutant
from tests.emulated import NOT_EMULATED

if NOT_EMULATED is not None:
    pytest.skip(f"needs the emulator: {NOT_EMULATED}", allow_module_level=True)

FORWARD, BACKWARD, GQA, BIAS = ("many-keys",), ("many-queries",), ("gqa",), ("bias-hides",)


def _without(
    source: str,
    text: str,
    cases: tuple[str, ...],
    why: str = "",
    *,
    in_float32: bool = False,
    deterministic: bool = False,
) -> Mutant:
    """`why` is the comment behind it; float32 has one stage of q and do where halves have two."""
    old = f"{text}{f'  // {why}' if why else ''}\n"
    dtype, variant = ("float32", "float-32") if in_float32 else ("float16", "half-32")
    return Mutant(
        f"{source}: no {why or text}", source, old, "\n", cases, dtype, variant, deterministic
    )


WAIT, BARRIER = "wait_copies<0>();", "__syncthreads();"
MUTANTS = (
    _without("forward.cuh", BARRIER, FORWARD, "k is there, and v read"),
    _without("forward.cuh", BARRIER, FORWARD, "v is there, and k read"),
    Mutant(
        "forward.cuh: no wait for k",
        "forward.cuh",
        f"{WAIT}\n    {BARRIER}  // k",
        f"{BARRIER}  // k",
        FORWARD,
    ),
    Mutant(
        "forward.cuh: no wait for v",
        "forward.cuh",
        f"{WAIT}\n    {BARRIER}  // v",
        f"{BARRIER}  // v",
        FORWARD,
    ),
    _without(
        "backward.cuh",
        BARRIER,
        BACKWARD,
        "q and do are there; p, ds and the other stage are read",
    ),
    _without("backward.cuh", BARRIER, BACKWARD, "p and ds are there"),
    _without("backward.cuh", WAIT, BACKWARD),
    _without("backward.cuh", BARRIER, BACKWARD, "q and do are read", in_float32=True),
    _without(
        "backward.cuh",
        f"if (kStages == 1) {BARRIER}",
        GQA,
        "the head before has read its tiles",
        in_float32=True,
    ),
    _without("backward.cuh", BARRIER, GQA, "everybody has read the number", deterministic=True),
    _without("bias_gradient.cuh", BARRIER, BIAS, "the tiles before are read"),
    _without("bias_gradient.cuh", WAIT, BIAS),
    Mutant(
        "softmax.cuh: half of a row",
        "softmax.cuh",
        "return x + __shfl_xor_sync(~0u, x, 2);",
        "return x;",
        FORWARD,
    ),
    Mutant(
        "shared_tile.cuh: a row too far",
        "shared_tile.cuh",
        "(columns / kPanel * kRows + rows)",
        "(columns / kPanel * kRows + rows + 1)",
        FORWARD,
    ),
)


def test_unchanged_kernels_are_right(tmp_path: Path) -> None:
    line, cases = "Block block = walk.next();", (*FORWARD, *BACKWARD, *GQA, *BIAS)
    same = Mutant("unchanged", "forward.cuh", line, line, cases)
    assert set(mutants.errors(same, mutants.build(same, tmp_path))) == {"right"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_noticed_under_every_schedule(mutant: Mutant, tmp_path: Path) -> None:
    lines = mutants.errors(mutant, mutants.build(mutant, tmp_path))
    shutil.rmtree(tmp_path)
    print(*lines, sep="\n")
    assert "right" not in lines
