"""Compute capabilities that CUDA kernels are compiled for, and the corresponding flags of nvcc."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from setuptools.errors import PlatformError

from building.cuda_toolkit import NoCudaError, Toolkit
from building.tile_config import LARGE_SHARED

Capability = tuple[int, int]

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
"""Environment variable: compute capabilities such as "8.0;9.0+PTX", "native" for the visible GPUs,
or "none". If it is unset, a CPU build of torch gets no CUDA kernels. A CUDA build of torch gets
kernels for the visible GPUs or, without a GPU, for DEFAULT_CHIPS."""

MINIMUM_CAPABILITY: Capability = (8, 0)
"""The kernels need mma.sync for bfloat16, and cp.async."""

DEFAULT_CHIPS: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))

HOPPER: Capability = (9, 0)
HOPPER_CODE = "sm_90a"
"""Target with the instructions that exist only on compute capability 9.0 (wgmma, setmaxnreg). Every
nvcc that compiles for sm_90 also compiles for sm_90a, although --list-gpu-code does not name it."""

NAME_CHIPS = f'set {ARCH_LIST}="8.0;9.0+PTX", with the compute capabilities you need'


@dataclass(frozen=True)
class Chips:
    """A set of compute capabilities to compile kernels for."""

    capabilities: tuple[Capability, ...]
    ptx: bool
    """True to include PTX, which drivers compile for newer chips."""
    too_old: tuple[Capability, ...] = ()
    """Requested capabilities below MINIMUM_CAPABILITY, which are skipped."""
    hopper: bool = False
    """True to include the kernels of csrc/cuda/sm90."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the targets, as build_info() reports them."""
        codes = map(code, self.capabilities)
        hopper = (HOPPER_CODE,) if self.hopper else ()
        return (*codes, *hopper, *(("compute_86",) if self.ptx else ()))

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for the kernels of sm80.

        They are compiled with two tile configurations: for 163 KiB of shared memory per block, and
        for 99 KiB. PTX always has the smaller tiles, because it must run on every chip.
        """
        large = [code(one) for one in self.capabilities if one in LARGE_SHARED]
        small = [code(one) for one in self.capabilities if one not in LARGE_SHARED]
        small += ["compute_86"] if self.ptx else []
        return (*_gencode("compute_80", large), *_gencode("compute_86", small))

    @property
    def hopper_flags(self) -> tuple[str, ...]:
        """Flags for the kernels of sm90."""
        return _gencode("compute_90a", [HOPPER_CODE] if self.hopper else [])


def code(capability: Capability) -> str:
    """The target of a capability: "sm_80" for (8, 0)."""
    return "sm_{}{}".format(*capability)


def _gencode(virtual: str, codes: Sequence[str]) -> tuple[str, ...]:
    return ("-gencode", f"arch={virtual},code=[{','.join(codes)}]") if codes else ()


def chips_for(arch_list: str, toolkit: Toolkit) -> Chips:
    """The chips of an arch list such as "8.0;9.0+PTX".

    Raises PlatformError if the list is malformed or names a chip that nvcc does not support, and
    NoCudaError if all chips are too old.
    """
    asked, ptx = parse_arch_list(arch_list)
    too_old = tuple(one for one in asked if one < MINIMUM_CAPABILITY)
    wanted = tuple(one for one in asked if one >= MINIMUM_CAPABILITY)
    for one in wanted:
        if code(one) not in toolkit.codes:
            raise PlatformError(
                f"{ARCH_LIST} is {arch_list!r}, but nvcc of CUDA {toolkit.version} does not "
                f"compile for {code(one)}"
            )
    if not wanted:
        raise NoCudaError(
            f"{ARCH_LIST} is {arch_list!r}, but the kernels need compute capability "
            "{}.{} or later".format(*MINIMUM_CAPABILITY),
            NAME_CHIPS,
        )
    return Chips(wanted, ptx, too_old, hopper=HOPPER in wanted)


def chips_of_gpus(gpus: Sequence[Capability], toolkit: Toolkit) -> Chips:
    """The chips of these GPUs, and PTX if some are newer than this nvcc.

    Raises NoCudaError if all of them are too old.
    """
    too_old = tuple(one for one in gpus if one < MINIMUM_CAPABILITY)
    wanted = [one for one in gpus if one >= MINIMUM_CAPABILITY]
    if not wanted:
        raise NoCudaError(
            f"the visible GPUs are {', '.join(map(code, too_old))}, but the kernels need "
            f"{code(MINIMUM_CAPABILITY)} or later",
            NAME_CHIPS,
        )
    known = tuple(one for one in wanted if code(one) in toolkit.codes)
    return Chips(known, len(known) < len(wanted), too_old, hopper=HOPPER in known)


def default_chips(toolkit: Toolkit) -> Chips:
    """DEFAULT_CHIPS as far as this nvcc supports them, and PTX."""
    known = tuple(one for one in DEFAULT_CHIPS if code(one) in toolkit.codes)
    return Chips(known, ptx=True, hopper=HOPPER in known)


def parse_arch_list(text: str) -> tuple[tuple[Capability, ...], bool]:
    """Returns the capabilities of an arch list in ascending order, and True if it requests PTX.

    The suffixes of "9.0a" and "10.0f" are ignored: kernels for sm_90a are built with 9.0 anyway.
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
