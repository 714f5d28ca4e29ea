"""Small calls on a CUDA device to run under compute-sanitizer. Results are not checked here.

compute-sanitizer --tool memcheck python -m tests.gpu.sanitizer_targets memcheck
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from tests.kernels.cuda.hopper_cases import HOPPER_CASES
from tests.support.case import AnyCase
from tests.support.cases import CASES
from tests.support.decode_cases import DECODE_CASES
from tests.support.linear import LINEAR_CASES
from transformer_kernels.backends.native.cuda_support import not_built_reason

BACKENDS = ("cuda", "triton")
ATTENTION_TARGETS = (
    *("causal", "padding", "blocks-heads", "bias-tiles", "gqa-everything", "unaligned-causal"),
    *("relative-everything", "relative-blocks", "keys-everything", "keys-window"),
)
"""Names of cases that together cover every kind of memory access: masks, bias, dropout, strides."""
HOPPER_TARGETS = ("persistent-192", "queries-192", "dropout-128", "dropout-192", "dropout-256")
"""Likewise, other widths and several tiles per CTA of the Hopper kernels, for memcheck. racecheck
takes the second use of a pipeline stage for a race (docs/reliability.md)."""
DECODE_TARGETS = ("long", "pages-of-24", "pages-group-8-queries-17", "relative-everything")
"""Likewise, names of decoding cases."""
LINEAR_TARGETS = ("gqa", "range", "all-lengths", "not-normalized")
"""Likewise, names of cases of linear attention."""


def main() -> None:
    for backend in BACKENDS:
        if backend == "cuda" and (reason := not_built_reason()) is not None:
            print(f"not run by {backend}: {reason}")
            continue
        hopper = HOPPER_TARGETS if backend == "cuda" and "memcheck" in sys.argv[1:] else ()
        tables: list[tuple[str, Iterable[AnyCase], tuple[str, ...]]] = [
            ("attention", (*CASES, *HOPPER_CASES), ATTENTION_TARGETS + hopper),
            ("linear attention", LINEAR_CASES, LINEAR_TARGETS),
            ("decoding", DECODE_CASES, DECODE_TARGETS),
        ]
        for operator, cases, names in tables:
            for case in cases:
                if case.name in names:
                    case.run(case.inputs(torch.bfloat16, "cuda"), backend)
                    torch.cuda.synchronize()
                    print(f"{backend} ran {operator}, {case.name}", flush=True)


if __name__ == "__main__":
    main()
