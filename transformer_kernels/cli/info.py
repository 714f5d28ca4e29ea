"""The command `info`: prints versions, devices and available kernels."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "info",
        help="show versions, devices and available kernels, and how to get the missing ones",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..info import info

    print(info())
    return 0
