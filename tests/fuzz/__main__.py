"""Random calls for a limited time, or one call: `make fuzz SECONDS=60 SEED=1 ONLY=cpu`.

Calls run in child processes, so that a crash or a hang is a finding. Docs: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from tests.fuzz.calls import parse
from tests.fuzz.campaign import Finding, Report, run_campaign
from tests.fuzz.executor import SANITIZE
from tests.fuzz.generators import GENERATORS, SANITIZED
from tests.fuzz.process import ExecutorProcess


def main(arguments: list[str]) -> int:
    """Returns 1 if a call failed."""
    options = _parser().parse_args(arguments)
    if options.call:
        return _run_one(options.call)
    names = options.only.split(",") if options.only else _default_names()
    seconds = options.seconds * min(options.jobs, len(names)) / len(names)
    print(f"seed {options.seed}, {seconds:.0f} s each: {', '.join(names)}", flush=True)
    findings = 0
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        running = [pool.submit(run_campaign, name, seconds, options.seed) for name in names]
        for done in as_completed(running):
            report = done.result()
            findings += len(report.findings)
            _show(report)
    return 1 if findings else 0


def _default_names() -> list[str]:
    return list(SANITIZED if os.environ.get(SANITIZE) == "1" else GENERATORS)


def _run_one(source: str) -> int:
    with ExecutorProcess() as executor:
        failure = executor.run(parse(source))
    print("passed" if failure is None else f"{failure.kind}: {failure.text}")
    return 0 if failure is None else 1


def _show(report: Report) -> None:
    seeds = f"seeds {report.seeds[0]} to {report.seeds[-1]}" if report.seeds else "no seed"
    print(
        f"{report.name}: {report.calls} calls, {seeds}, {len(report.findings)} findings",
        flush=True,
    )
    for finding in report.findings:
        print(_text(finding), flush=True)


def _text(finding: Finding) -> str:
    lines = finding.failure.text.rstrip().replace("\n", "\n    ")
    prefix = f"{SANITIZE}=1 " if os.environ.get(SANITIZE) == "1" else ""
    command = f'{prefix}python -m tests.fuzz --call "{finding.call!r}"'
    return f"  {finding.failure.kind}, seed {finding.seed}: {lines}\n  {command}\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all generators together")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(GENERATORS)}")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--call", metavar="SOURCE", help="run this call only")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
