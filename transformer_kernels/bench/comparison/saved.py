"""Saved runs, and what became slower or faster from one to the other.

The machine's speed differs between two runs. Where both have torch's SDPA on a call, the times of
every other variant are divided by SDPA's in the same round; otherwise times are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..cases import SIZES
from ..contenders import Measured
from ..rows import Row, row_from, row_values

FORMAT = "transformer_kernels.bench 1"
CONTROL = "sdpa"
RESAMPLES = 2000
CONFIDENCE = 0.95
LEAST = 0.02
"""Changes of less than 2% are not reported, however certain."""

_IDENTITY = ("case", "dtype", *SIZES, "mask", "direction", "variant", "threads", "device")
"""Columns of a row that are the same in both runs."""


@dataclass(frozen=True)
class Change:
    """Ratio of the times of one variant, later over earlier."""

    row: Row
    ratio: float
    low: float
    high: float
    """bounds of the confidence interval"""
    by_control: bool
    """True if times are relative to torch's SDPA"""

    @property
    def verdict(self) -> str:
        """Returns "slower" or "faster" if the whole interval is beyond LEAST, else "same"."""
        if self.low > 1.0 + LEAST:
            return "slower"
        return "faster" if self.high < 1.0 / (1.0 + LEAST) else "same"


def save(path: Path, measured: Sequence[Measured]) -> None:
    """Writes a run, with the time of every round, as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    rows = [{"row": row_values(one.row), "laps": one.laps} for one in measured]
    path.write_text(json.dumps({"format": FORMAT, "measured": rows}, indent=1), encoding="utf-8")


def load(path: Path) -> list[Measured]:
    """Reads a run.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a saved run.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        run = [
            Measured(row_from(one["row"]), tuple(map(float, one["laps"])))
            for one in content["measured"]
        ]
        if not all(one.laps for one in run):
            raise ValueError("a measurement without rounds")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a run saved by `bench --save`: {error}") from None
    return run


def changes(before: Sequence[Measured], after: Sequence[Measured]) -> list[Change]:
    """Compares the measurements that both runs have; the largest slow-down comes first."""
    return sorted(_changes(before, after), key=lambda change: change.ratio, reverse=True)


def _changes(before: Sequence[Measured], after: Sequence[Measured]) -> Iterator[Change]:
    earlier, later = ({_key(one.row): one for one in run} for run in (before, after))
    generator = torch.Generator().manual_seed(0)
    for key in later.keys() & earlier.keys():
        row = later[key].row
        control = _key(replace(row, variant=CONTROL))
        by_control = row.variant != CONTROL and control in earlier and control in later
        medians = []
        for run in (later, earlier):
            times = torch.tensor(run[key].laps, dtype=torch.float64)
            if by_control:
                own = torch.tensor(run[control].laps, dtype=torch.float64)
                rounds = min(len(times), len(own))
                times = times[:rounds] / own[:rounds]
            medians.append(_medians(times, generator))
        ratio, *resampled = medians[0] / medians[1]
        tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
        low, high = torch.stack(resampled).quantile(tails).tolist()
        yield Change(row, float(ratio), low, high, by_control)


def _key(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in _IDENTITY)


def _medians(times: Tensor, generator: torch.Generator) -> Tensor:
    """The median, and those of RESAMPLES bootstrap samples (Efron 1979)."""
    index = torch.randint(len(times), (RESAMPLES, len(times)), generator=generator)
    return torch.cat([times[None], times[index]]).quantile(0.5, dim=1)
