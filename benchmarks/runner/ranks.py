"""Comparisons on gloo processes of one thread, which are started for each of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels.bench import (
    Budget,
    Case,
    Direction,
    Interleaver,
    Provenance,
    Row,
    Timing,
    make_row,
    peak_extra_bytes,
)
from transformer_kernels.bench.workload import Prepare
from transformer_kernels.training.distributed import end_process_group


@dataclass(frozen=True)
class Rank:
    """This process among those of a comparison, and the columns of its rows."""

    budget: Budget
    provenance: Provenance
    suite: str

    def rows(
        self,
        calls: Mapping[tuple[Case, Direction, str], Prepare],
        rates: Mapping[str, Prepare],
        *,
        errors: Mapping[str, float],
    ) -> tuple[list[Row], dict[str, Timing]]:
        """Measures peak memory of calls, and times of calls and rates. A collective.

        Returns:
            The rows of the calls, and the timings of the rates.
        """
        peaks = {key: self._peak(prepare) for key, prepare in calls.items()}
        work = {str(n): prepare for n, prepare in enumerate(calls.values())} | dict(rates)
        timings = self._timings({name: _together(prepare) for name, prepare in work.items()})
        rows = [
            make_row(
                self.provenance, suite=self.suite, case=case, direction=direction,
                variant=variant, timing=timings[str(n)], peak_bytes=peaks[case, direction, variant],
                error=errors[variant],
            )
            for n, (case, direction, variant) in enumerate(calls)
        ]  # fmt: skip
        return rows, {name: timings[name] for name in rates}

    def _peak(self, prepare: Prepare) -> int | None:
        measured = peak_extra_bytes(_together(prepare))
        peak = torch.tensor(-1 if measured is None else measured)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return None if peak < 0 else int(peak)

    def _timings(self, work: Mapping[str, Prepare]) -> dict[str, Timing]:
        """Runs one untimed round, then as many as the first process has time for."""
        timer = Interleaver(work, dict.fromkeys(work, 1))
        timer.round()
        seconds = torch.tensor([one.median_ms / 1e3 for one in timer.timings().values()]).sum()
        dist.broadcast(seconds, 0)
        rounds = self.budget.rounds(float(seconds))
        timer = Interleaver(work, dict.fromkeys(work, rounds))
        for _ in range(rounds):
            timer.round()
        return timer.timings()


def _together(prepare: Prepare) -> Prepare:
    """Starts a call in all processes at once, and ends it with the last one."""

    def prepare_all() -> Callable[[], object]:
        workload = prepare()
        dist.barrier()

        def run() -> object:
            result = workload()
            dist.barrier()
            return result

        return run

    return prepare_all


def on_ranks(size: int, name: str, measure: Callable[[Rank], list[Row]]) -> Comparison:
    def measurements(run: Run) -> Iterator[Measurement]:
        yield partial(start, size, measure, run.budget, run.provenance)

    return Comparison(name=f"{name}-{size} processes", measurements=measurements)


def start(
    size: int,
    measure: Callable[[Rank], list[Row]],
    budget: Budget,
    provenance: Provenance,
    suite: str,
) -> list[Row]:
    """Runs a function in processes; returns the rows of the first one."""
    rank = Rank(budget, replace(provenance, threads=size), suite)
    with TemporaryDirectory() as folder:
        spawn(_process, (size, folder, measure, rank), nprocs=size)
        rows: list[Row] = pickle.loads((Path(folder) / "rows").read_bytes())
    return rows


def _process(
    number: int, size: int, folder: str, measure: Callable[[Rank], list[Row]], rank: Rank
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=size)
    rows = measure(rank)
    if number == 0:
        (Path(folder) / "rows").write_bytes(pickle.dumps(rows))
    end_process_group()
