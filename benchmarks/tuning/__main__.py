"""Times other tiles of the kernels on the GPU of this machine.

python -m benchmarks.tuning triton --width 64     every tile that fits (docs/triton.md)
python -m benchmarks.tuning cuda --S 4096         rows of TILES (docs/hopper.md, section 8)
"""

from __future__ import annotations

import argparse
import math

from benchmarks.tuning import cuda, triton


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    for name, module in (("triton", triton), ("cuda", cuda)):
        command = commands.add_parser(name, description=module.__doc__)
        module.add_options(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    if not 0 < args.seconds < math.inf:
        parser.error(f"--seconds must be positive and finite, got {args.seconds}")
    args.run(args)


if __name__ == "__main__":
    main()
