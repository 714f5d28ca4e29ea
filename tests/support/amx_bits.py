"""Bits of every case of the table by the kernels for AMX, for a comparison with emulated tiles.

    python -m tests.support.amx_bits [emulated-]amx

prints the checksum of each output of each case, as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import zlib

import torch
from torch import Tensor

from tests.support import emulated_amx


def checksum(x: Tensor) -> int:
    """Checksum of the bits; all NaN are equal."""
    x = x.masked_fill(x.isnan(), torch.nan).contiguous()
    return zlib.crc32(x.view(torch.uint8).numpy().tobytes())


def main(isa: str) -> None:
    emulated_amx.choose(isa)
    from tests.support.cases import CASES

    torch.set_num_threads(1)
    found = {
        f"{case}-{dtype}-{name}": checksum(x)
        for case, dtype in itertools.product(CASES, (torch.float32, torch.bfloat16, torch.float16))
        for name, x in case.run(case.inputs(dtype), "cpu").items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
