"""Operators called directly refuse tensors whose sizes do not fit: kernels index them unchecked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from building.extension import ROOT
from tests.support.backends import COMPILED_BACKENDS, operators_of
from tests.support.operators import NOTHING_WANTED, operator_arguments
from transformer_kernels.masks.resolved import BLOCK_MASK_SIZE
from transformer_kernels.scores.options import DIFFERENTIABLE

B, H, M, N, D = 2, 2, 5, 9, 4
LENGTHS = torch.tensor([N], dtype=torch.int32)


def arguments(batch: int = 1, **options: Any) -> dict[str, Any]:
    q, k, v = (torch.randn(batch, H, length, D) for length in (M, N, N))
    return operator_arguments(q, k, v, **options)


def packed(**given: Any) -> dict[str, Any]:
    """Options of two sequences of (3, 2) and (2, 7) queries and keys."""
    starts = {"cu_seqlens_q": [0, 3, 5], "cu_seqlens_k": [0, 2, 9]}
    return {name: torch.tensor(x, dtype=torch.int32) for name, x in starts.items()} | given


TABLES: dict[str, dict[str, Any]] = {
    "short": {"relative_bias": torch.ones(H, M + N - 2)},
    "long": {"relative_bias": torch.ones(1, M + N)},
    "heads": {"relative_bias": torch.ones(3, M + N - 1)},
    "1d": {"relative_bias": torch.ones(M + N - 1)},
    "half": {"relative_bias": torch.ones(H, M + N - 1).half()},
    "double": {"relative_bias": torch.ones(H, M + N - 1).double()},
    "cache": {"relative_bias": torch.ones(H, M + N), "cache_seqlens": LENGTHS},
    "packed": packed(relative_bias=torch.ones(H, M + N - 1), max_seqlen_q=3, max_seqlen_k=7),
    "packed-huge": packed(relative_bias=torch.ones(H, M + N - 1), max_seqlen_k=(1 << 63) - 1),
}
KEYS: dict[str, dict[str, Any]] = {
    "short": {"relative_keys": torch.ones(H, M + N - 2, D)},
    "long": {"relative_keys": torch.ones(1, M + N, D)},
    "heads": {"relative_keys": torch.ones(3, M + N - 1, D)},
    "no-heads": {"relative_keys": torch.ones(0, M + N - 1, D)},
    "2d": {"relative_keys": torch.ones(H, M + N - 1)},
    "width": {"relative_keys": torch.ones(H, M + N - 1, D + 1)},
    "half": {"relative_keys": torch.ones(H, M + N - 1, D).half()},
    "double": {"relative_keys": torch.ones(H, M + N - 1, D).double()},
    "packed": packed(relative_keys=torch.ones(H, M + N - 1, D), max_seqlen_q=3, max_seqlen_k=7),
    "packed-huge": packed(relative_keys=torch.ones(H, M + N - 1, D), max_seqlen_k=(1 << 63) - 1),
    "with-a-table": {
        "relative_keys": torch.ones(H, M + N, D),
        "relative_bias": torch.ones(H, M + N - 1),
    },
}
WRONG_TABLE = r"relative_bias must be \(1\|H_q, distances\), in float"
WRONG_KEYS = r"relative_keys must be \(1\|H_q, distances, D\), in q's dtype"


def positions(tests: int = 1, batch: int = B, heads: int = 1, M: int = M, N: int = N) -> Any:
    q, k = (torch.zeros(tests, batch, heads, length).long() for length in (M, N))
    return {"q_low": q, "q_high": q, "k_position": k}


TOGETHER = "q_low, q_high and k_position must be given together"
POSITIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no-low": (positions() | {"q_low": None}, TOGETHER),
    "no-high": (positions() | {"q_high": None}, TOGETHER),
    "no-position": (positions() | {"k_position": None}, TOGETHER),
    "no-tests": (positions(tests=0), "q_low must hold at least one position test"),
    "counts": (positions() | {"k_position": positions(tests=2)["k_position"]}, "k_position must"),
    "highs": (positions() | {"q_high": positions(heads=H)["q_high"]}, "must have the same shape"),
    "batch": (positions(batch=3), "q_low must be"),
    "heads": (positions(heads=3), "q_low must be"),
    "queries": (positions(M=M - 1), "q_low must be"),
    "keys": (positions(N=N + 1), "k_position must be"),
    "3d": ({name: x[0] for name, x in positions().items()}, "q_low must be"),
    "int32": ({name: x.int() for name, x in positions().items()}, "q_low must be .* int64"),
}
REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    **{f"table-{name}": (1, given, WRONG_TABLE) for name, given in TABLES.items()},
    **{f"keys-{name}": (1, given, WRONG_KEYS) for name, given in KEYS.items()},
    **{f"positions-{name}": (B, *given) for name, given in POSITIONS.items()},
}
"""Size of the batch, options and error."""


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_misfits_are_refused(name: str, backend: str) -> None:
    batch, options, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        operators_of(backend).attention_forward(**arguments(batch, **options))


@pytest.mark.parametrize(
    "sizes", [{"batch": 1}, {"heads": H}, {"batch": 1, "heads": H, "tests": 3}]
)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_broadcast_sizes_are_accepted(sizes: dict[str, int], backend: str) -> None:
    o, *_ = operators_of(backend).attention_forward(**arguments(B, **positions(**sizes)))
    assert o.isfinite().all()


def test_keys_of_a_cache_have_its_distances() -> None:
    """On the CPU, whose kernels alone read the keys of a cache."""
    keys: dict[str, Any] = {"relative_keys": torch.ones(H, M + N, D)}
    with pytest.raises(RuntimeError, match=WRONG_KEYS):
        operators_of("cpu").attention_forward(**arguments(**keys, cache_seqlens=LENGTHS))


@pytest.mark.parametrize("width", [(), (D,)], ids=["table", "keys"])
@pytest.mark.parametrize("longest", [{"max_seqlen_q": 2}, {"max_seqlen_k": 6}], ids=str)
def test_sequences_beyond_their_bounds_are_refused(
    longest: dict[str, int], width: tuple[int, ...]
) -> None:
    """On the CPU, where reading the lengths does not wait for a device."""
    bounds = {"max_seqlen_q": 3, "max_seqlen_k": 7} | longest
    name = "relative_keys" if width else "relative_bias"
    options = packed(**{name: torch.ones(H, sum(bounds.values()) - 1, *width)}, **bounds)
    with pytest.raises(RuntimeError, match="no sequence may be longer than max_seqlen_q and"):
        operators_of("cpu").attention_forward(**arguments(**options))


@pytest.mark.parametrize("name", ["relative_bias", "relative_keys"])
def test_a_gradient_needs_its_option(name: str) -> None:
    q, k, v, *options = arguments().values()
    operators = operators_of("cpu")
    o, row_stats, block_mask = operators.attention_forward(q, k, v, *options)
    saved = (o, None, q, k, v, o, row_stats, block_mask)
    wanted = [option == name for option in DIFFERENTIABLE]
    with pytest.raises(RuntimeError, match=f"{name}_needs_grad requires {name}"):
        operators.attention_backward(*saved, *options, *wanted, False)


ROWS, COLUMNS, WIDTH = 70, 90, 8
SAVED = ("do", "dlse", "q", "k", "v", "o", "row_stats", "block_mask")
WRONG: dict[str, tuple[str, Tensor]] = {
    "do-short": ("do", torch.zeros(B, H, ROWS - 1, WIDTH)),
    "do-broadcast": ("do", torch.zeros(1, H, ROWS, WIDTH)),
    "do-dtype": ("do", torch.zeros(B, H, ROWS, WIDTH, dtype=torch.float16)),
    "o-narrow": ("o", torch.zeros(B, H, ROWS, WIDTH - 1)),
    "o-3d": ("o", torch.zeros(H, ROWS, WIDTH)),
    "row-stats-short": ("row_stats", torch.zeros(2, B, H, ROWS - 1)),
    "row-stats-heads": ("row_stats", torch.zeros(2, B, 1, ROWS)),
    "row-stats-dtype": ("row_stats", torch.zeros(2, B, H, ROWS, dtype=torch.float16)),
    "row-stats-lse-alone": ("row_stats", torch.zeros(1, B, H, ROWS)),
    "row-stats-3d": ("row_stats", torch.zeros(B, H, ROWS)),
    "dlse-short": ("dlse", torch.zeros(B, H, ROWS - 1)),
    "dlse-scalar": ("dlse", torch.zeros(())),
    "block-mask-rows": ("block_mask", torch.zeros(B, H, 1, 2, dtype=torch.uint8)),
    "block-mask-columns": ("block_mask", torch.zeros(B, H, 2, 1, dtype=torch.uint8)),
    "block-mask-batch": ("block_mask", torch.zeros(3, H, 2, 2, dtype=torch.uint8)),
    "block-mask-strided": ("block_mask", torch.zeros(B, H, 2, 4, dtype=torch.uint8)[..., ::2]),
}
"""Tensors of the forward pass that do not fit ROWS queries, COLUMNS keys and values of WIDTH."""


@pytest.mark.quick
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_wrong_tensors_are_refused(name: str, backend: str) -> None:
    operators = operators_of(backend)
    q, k = torch.randn(B, H, ROWS, D), torch.randn(B, H, COLUMNS, D)
    v = torch.randn(B, H, COLUMNS, WIDTH)
    given = operator_arguments(q, k, v, dense=torch.rand(B, H, ROWS, COLUMNS) < 0.5)
    _, _, _, *rest = given.values()
    o, row_stats, block_mask = operators.attention_forward(**given)
    saved = dict(zip(SAVED, (o, row_stats[0], q, k, v, o, row_stats, block_mask), strict=True))
    operators.attention_backward(*saved.values(), *rest, *NOTHING_WANTED)
    place, wrong = WRONG[name]
    saved[place] = wrong
    message = r"(o and do|row_stats|dlse|block mask) must be|expected a 4-D tensor"
    with pytest.raises(RuntimeError, match=message):
        operators.attention_backward(*saved.values(), *rest, *NOTHING_WANTED)


def test_block_mask_entries_have_one_size() -> None:
    header = (ROOT / "csrc/common/mask.h").read_text()
    assert f"constexpr int64_t kBlockMaskSize = {BLOCK_MASK_SIZE};" in header
