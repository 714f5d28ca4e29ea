"""The chips that CUDA kernels are compiled for, and the flags by which nvcc does it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from setuptools.errors import PlatformError

from building.cuda_toolkit import NoCudaError, Toolkit
from building.tile_config import LARGE_SHARED

Capability = tuple[int, int]

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
"""Environment variable: compute capabilities such as "8.0;9.0+PTX"; "native", the visible GPUs;
"none". Unset: nothing beside a torch for CPUs, else the visible GPUs, else DEFAULT_CHIPS."""

MINIMUM_CAPABILITY: Capability = (8, 0)
"""mma.sync of bfloat16, cp.async"""

DEFAULT_CHIPS: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))

HOPPER: Capability = (9, 0)
HOPPER_CODE = "sm_90a"
"""For instructions that only chips of 9.0 have; code for sm_90 runs there too, without them. Every
nvcc that knows the one knows the other, and lists the one alone."""

NAME_CHIPS = f'set {ARCH_LIST}="8.0;9.0+PTX", or whatever the compute capabilities are'


@dataclass(frozen=True)
class Chips:
    """A set of chips to compile kernels for."""

    capabilities: tuple[Capability, ...]
    ptx: bool
    """Also code that drivers compile for chips yet to come"""
    passed_over: tuple[Capability, ...] = ()
    """Asked for, but too old"""
    hopper: bool = False
    """Also the kernels of csrc/cuda/sm90"""

    @property
    def architectures(self) -> tuple[str, ...]:
        """As build_info() names them."""
        codes = map(code, self.capabilities)
        hopper = (HOPPER_CODE,) if self.hopper else ()
        return (*codes, *hopper, *(("compute_86",) if self.ptx else ()))

    @property
    def flags(self) -> tuple[str, ...]:
        """Kernels of sm80 are translated twice: with tiles for 163 KiB of shared memory, and 99.

        PTX is of the second kind whatever the chips, for it must run on any.
        """
        large = [code(one) for one in self.capabilities if one in LARGE_SHARED]
        small = [code(one) for one in self.capabilities if one not in LARGE_SHARED]
        small += ["compute_86"] if self.ptx else []
        return (*_gencode("compute_80", large), *_gencode("compute_86", small))

    @property
    def hopper_flags(self) -> tuple[str, ...]:
        return _gencode("compute_90a", [HOPPER_CODE] if self.hopper else [])


def code(capability: Capability) -> str:
    return "sm_{}{}".format(*capability)


def _gencode(virtual: str, codes: Sequence[str]) -> tuple[str, ...]:
    return ("-gencode", f"arch={virtual},code=[{','.join(codes)}]") if codes else ()


def chips_for(arch_list: str, toolkit: Toolkit) -> Chips:
    """The chips of an arch list such as "8.0;9.0+PTX".

    Raises PlatformError for what the format or nvcc does not know, NoCudaError if nothing remains.
    """
    asked, ptx = parse_arch_list(arch_list)
    passed_over = tuple(one for one in asked if one < MINIMUM_CAPABILITY)
    wanted = tuple(one for one in asked if one >= MINIMUM_CAPABILITY)
    for one in wanted:
        if code(one) not in toolkit.codes:
            raise PlatformError(
                f"{ARCH_LIST} is {arch_list!r}, and nvcc of CUDA {toolkit.version} does not "
                f"compile for {code(one)}"
            )
    if not wanted:
        raise NoCudaError(
            f"{ARCH_LIST} is {arch_list!r}, and they need compute capability "
            "{}.{} or later".format(*MINIMUM_CAPABILITY),
            NAME_CHIPS,
        )
    return Chips(wanted, ptx, passed_over, hopper=HOPPER in wanted)


def chips_of_gpus(gpus: Sequence[Capability], toolkit: Toolkit) -> Chips:
    """The chips of these GPUs; PTX for those that are newer than this nvcc.

    Raises NoCudaError if all of them are too old.
    """
    passed_over = tuple(one for one in gpus if one < MINIMUM_CAPABILITY)
    wanted = [one for one in gpus if one >= MINIMUM_CAPABILITY]
    if not wanted:
        raise NoCudaError(
            f"the GPUs here are {', '.join(map(code, passed_over))}, and the kernels need "
            f"{code(MINIMUM_CAPABILITY)} or later",
            NAME_CHIPS,
        )
    known = tuple(one for one in wanted if code(one) in toolkit.codes)
    return Chips(known, len(known) < len(wanted), passed_over, hopper=HOPPER in known)


def default_chips(toolkit: Toolkit) -> Chips:
    """The chips that most people have, as far as this nvcc knows them, and PTX."""
    known = tuple(one for one in DEFAULT_CHIPS if code(one) in toolkit.codes)
    return Chips(known, ptx=True, hopper=HOPPER in known)


def parse_arch_list(text: str) -> tuple[tuple[Capability, ...], bool]:
    """Capabilities of an arch list, ascending, and whether it asks for PTX.

    "9.0a" is "9.0": what the a stands for is used where it is. The f of "10.0f" is not used yet.
    """
    capabilities, ptx = set(), False
    for item in text.replace(";", " ").split():
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", item)
        if match is None:
            raise PlatformError(
                f"{ARCH_LIST} has {item!r}; expected compute capabilities such as '8.0;9.0+PTX', "
                "or 'native', or 'none'"
            )
        capabilities.add((int(match[1]), int(match[2])))
        ptx = ptx or match[3] is not None
    return tuple(sorted(capabilities)), ptx
