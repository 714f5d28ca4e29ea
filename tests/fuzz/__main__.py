"""Random calls for a limited time, or one call again: docs/reliability.md, section 5."""

from __future__ import annotations

import argparse
import secrets
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from multiprocessing import get_context

from building.ninja import available_cores
from tests.fuzz.calls import parse
from tests.fuzz.campaign import GENERATORS, Report, generators, run_campaign
from tests.fuzz.process import ExecutorProcess
from tests.support import libraries


def main(arguments: list[str]) -> int:
    """Returns 1 if a call failed."""
    options = _parser().parse_args(arguments)
    if options.sanitize and (reason := libraries.sanitizers_unavailable_reason()):
        print(f"no sanitizers: {reason}", file=sys.stderr)
        return 2
    if options.call:
        return _run_one(options.call, options.sanitize)
    known = generators(options.sanitize)
    names = options.only.split(",") if options.only else list(known)
    if unknown := set(names) - known.keys():
        print(f"no generator {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    seconds = options.seconds * min(options.jobs, len(names)) / len(names)
    print(f"seed {options.seed}, {seconds:.0f} s each: {', '.join(names)}", flush=True)
    findings = 0
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        running = [
            pool.submit(run_campaign, name, seconds, options.seed, options.sanitize)
            for name in names
        ]
        for done in as_completed(running):
            report = done.result()
            findings += len(report.findings)
            _show(report, "--sanitize " if options.sanitize else "")
    return 1 if findings else 0


def _run_one(source: str, sanitize: bool) -> int:
    with closing(ExecutorProcess(sanitize)) as executor:
        failure = executor.run(parse(source))
    print("passed" if failure is None else f"{failure.kind}: {failure.text}")
    return 0 if failure is None else 1


def _show(report: Report, options: str) -> None:
    seeds = f"seeds {report.seeds[0]} to {report.seeds[-1]}" if report.seeds else "no seed"
    count = len(report.findings)
    print(f"{report.name}: {report.calls} calls, {seeds}, {count} findings", flush=True)
    for finding in report.findings:
        text = finding.failure.text.rstrip().replace("\n", "\n    ")
        print(f"  {finding.failure.kind}, seed {finding.seed}: {text}")
        print(f'  python -m tests.fuzz {options}--call "{finding.call!r}"\n', flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all generators together")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(GENERATORS)}")
    parser.add_argument("--sanitize", action="store_true", help="AddressSanitizer and UBSan")
    parser.add_argument("--jobs", type=int, default=available_cores(), help="processes")
    parser.add_argument("--call", metavar="SOURCE", help="run this call only")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
