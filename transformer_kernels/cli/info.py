"""The command `info`."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "info", help="versions, devices, built kernels, and what is missing with how to get it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from transformer_kernels.info import info

    print(info())
    return 0
