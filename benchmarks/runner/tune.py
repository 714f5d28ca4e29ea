"""Compares variants of the CUDA kernels with the present kernels, in turns: `make gpu-tune`.

    python -m benchmarks.runner.tune --only sm90-fwd-128-176-keys --S 4096 --seconds 10

Every variant of benchmarks/cases/tuning.py is a library of its own in build/tune, with its own
operator namespace. All of them run in one process: each round of a case calls the present kernels,
a second library of the same kernels, and every variant of the group. Each is first compared with
float64. The last lines name the changes that are faster in every case (docs/hopper.md, section 8).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from setuptools.errors import CompileError

from benchmarks.cases.gpu import gpu_case
from benchmarks.cases.tuning import KERNEL_VARIANTS, Group, Kernels, KernelVariant
from benchmarks.report.tune import (
    AGAIN,
    PRESENT,
    Compared,
    Failed,
    Result,
    conclusion,
    headings,
    line,
)
from benchmarks.runner.gpu import impossible_reason
from benchmarks.runner.record import UNRECORDED, Recorder
from building import edited
from building.cuda_toolkit import NoCudaError
from building.edited import Library
from transformer_kernels.backends import CudaBackend
from transformer_kernels.backends.native import cuda_support
from transformer_kernels.backends.native.cuda import HOPPER_SWITCH
from transformer_kernels.bench import (
    Attend,
    Budget,
    Case,
    Interleaver,
    Provenance,
    Row,
    Variant,
    clock_for,
    make_row,
    prepare_work,
)
from transformer_kernels.bench.trial import DeviceLostError, Trial, try_out
from transformer_kernels.bench.variants import ours
from transformer_kernels.common.namespace import NAMESPACE
from transformer_kernels.masks.mask import Mask

LENGTHS = (4096, 16384)
SECONDS = 3.0
FEWEST, MOST = 20, 400
"""Bounds on the rounds of a case."""


def unchanged(kernels: Kernels) -> dict[str, Library]:
    """Libraries of the present kernels, by label.

    sm80 and sm90 have their own, because a library chooses between them once (`choose_kernels`).
    """
    names = {PRESENT: "present", AGAIN: "again"}
    return {label: Library(f"{kernels}-{name}") for label, name in names.items()}


def libraries(group: Group, variants: Sequence[KernelVariant]) -> dict[str, Library]:
    """The libraries to compare in the cases of a group, by label; PRESENT first."""
    own = {one.name: Library(one.name, (one.unit,), one.edits) for one in variants}
    return unchanged(group.kernels) | own


def grouped(variants: Sequence[KernelVariant]) -> dict[Group, list[KernelVariant]]:
    groups: dict[Group, list[KernelVariant]] = {}
    for variant in variants:
        groups.setdefault(variant.group, []).append(variant)
    return groups


def build(variants: Sequence[KernelVariant], original: edited.Original) -> dict[str, Path]:
    """Builds the libraries of all groups, and prints the advice of ptxas on their kernels.

    Returns:
        Paths of the libraries by namespace.

    Raises:
        CompileError: a library does not compile.
    """
    every = {
        library.name: library
        for group, own in grouped(variants).items()
        for library in libraries(group, own).values()
    }
    paths = edited.build(list(every.values()), original)
    for name, library in every.items():
        for text in edited.advice(library, original):
            print(f"{name}: {text}", flush=True)
    return {library.namespace: paths[name] for name, library in every.items()}


def use_library(device: torch.device, namespace: str) -> None:
    """Runs the operators of a library that is loaded into this process, from now on."""
    cuda_support.libraries[device.type].operators = getattr(torch.ops, namespace)


def choose_kernels(library: Library, kernels: Kernels) -> str | None:
    """Makes a library run the kernels of sm80 or of sm90, before its first call.

    Each library reads the environment variable HOPPER_SWITCH once.

    Returns:
        The reason why it runs others, or None.
    """
    os.environ[HOPPER_SWITCH] = "1" if kernels == "sm90" else "0"
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    runs_hopper = bool(getattr(torch.ops, library.namespace).runs_hopper(device))
    if runs_hopper == (kernels == "sm90"):
        return None
    return "the GPU is not a Hopper GPU, or its kernels are not built"


def cases_for(group: Group, lengths: Sequence[int]) -> list[Case]:
    """Cases of a group: full and causal at each length."""
    masks = {"full": None, "causal": Mask.causal()}
    return [
        gpu_case(
            name, S, group.D, D_v=group.D_v, mask=mask, mask_name="none" if mask is None else name
        )
        for S in lengths
        for name, mask in masks.items()
    ]


def compare(
    variants: Sequence[KernelVariant],
    cases_of: Callable[[Group], Sequence[Case]],
    budget: Budget,
    recorder: Recorder,
    device: torch.device,
) -> Iterator[Result]:
    """Compares all variants, whose libraries are loaded.

    Args:
        variants: the variants.
        cases_of: maps a group to its cases, on the CPU.
        budget: rounds of each case.
        recorder: receives the rows.
        device: a CUDA device, or the CPU with emulated kernels.
    """
    for group, own in grouped(variants).items():
        by_label = libraries(group, own)
        reasons = {label: choose_kernels(x, group.kernels) for label, x in by_label.items()}
        broken = {label: reason for label, reason in reasons.items() if reason is not None}
        if broken:
            yield from (
                Failed(group=group, variant=label, case="all", reason=reason)
                for label, reason in broken.items()
            )
            continue
        for case in cases_of(group):
            yield from _compare_case(group, case.to(device), by_label, budget, recorder)


def _compare_case(
    group: Group,
    case: Case,
    by_label: Mapping[str, Library],
    budget: Budget,
    recorder: Recorder,
) -> Iterator[Result]:
    name = f"{case.name}, S = {case.M}"
    trial = try_out(case, [_bench_variant(*one) for one in by_label.items()])
    for label, reason in trial.broken.items():
        yield Failed(group=group, variant=label, case=name, reason=reason)
    if PRESENT in trial.broken:
        return
    rows, timer = _measured(group, trial, budget, recorder.provenance)
    recorder.add(rows.values())
    ratios = timer.ratios(PRESENT)
    for label, row in rows.items():
        if label != PRESENT:
            yield Compared(
                group=group, variant=label, case=name,
                present_tflops=rows[PRESENT].tflops, tflops=row.tflops, ratio=ratios[label],
            )  # fmt: skip


def _bench_variant(label: str, library: Library) -> Variant:
    """The library as a variant of the benchmarks, by the label of its rows."""

    def attend_for(case: Case) -> Attend:
        attend = ours("cuda")(case)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Also for the backward pass: it runs before the next forward pass of any library.
            use_library(q.device, library.namespace)
            return attend(q, k, v)

        return call

    return Variant(label, label, attend_for, devices=("cpu", "cuda"), is_peer=False)


def _measured(
    group: Group, trial: Trial, budget: Budget, provenance: Provenance
) -> tuple[dict[str, Row], Interleaver]:
    """Times the correct variants in turns."""
    checked, direction = trial.checked, group.direction
    case, expected = checked.case, checked.expected.exact
    work = {
        label: prepare_work(attend, checked.inputs, direction)
        for label, attend in checked.attends.items()
    }
    timer = Interleaver(work, clock=clock_for(case.device))
    timings = timer.run(budget)
    rows = {
        label: make_row(
            provenance, suite="tune", case=case, direction=direction,
            variant=f"{group}: {label}" if label in (PRESENT, AGAIN) else label,
            timing=timing, peak_bytes=None,
            error=checked.outputs[label].error(expected, direction),
        )
        for label, timing in timings.items()
    }  # fmt: skip
    return rows, timer


def report(variants: Sequence[KernelVariant], results: Iterator[Result]) -> None:
    """Prints the table as results come, then the conclusion."""
    print(*headings(), sep="\n", flush=True)
    known = []
    for result in results:
        print(line(result), flush=True)
        known.append(result)
    print("", *conclusion(variants, known), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    by_name = {variant.name: variant for variant in KERNEL_VARIANTS}
    parser.add_argument("--only", nargs="+", choices=by_name, metavar="NAME", default=[*by_name])
    parser.add_argument("--S", nargs="+", type=int, default=LENGTHS, help="lengths of sequences")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for each case")
    parser.add_argument("--out", type=Path, default=UNRECORDED, help="folder of tune.csv")
    args = parser.parse_args()
    reason = impossible_reason("make gpu-tune") or CudaBackend().unavailable_reason()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    variants = [by_name[name] for name in args.only]
    try:
        paths = build(variants, edited.extension())
    except (CompileError, NoCudaError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in paths.values():
        torch.ops.load_library(path)
    device, budget = torch.device("cuda"), Budget(args.seconds, FEWEST, MOST)
    recorder = Recorder(Provenance.now().on(device), budget, folder=args.out, keep=False)
    provenance = recorder.provenance
    print(f"{provenance.device}, torch {provenance.torch}, commit {provenance.commit}", end="\n\n")
    results = compare(variants, lambda one: cases_for(one, args.S), budget, recorder, device)
    try:
        report(variants, results)
    except DeviceLostError as lost:
        print(lost, file=sys.stderr)
        return 1
    finally:
        use_library(device, NAMESPACE)
    print("", *(f"rows: {path}" for path in recorder.paths), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
