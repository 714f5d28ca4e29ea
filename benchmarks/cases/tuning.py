"""Variants of the CUDA kernels to compare with the present ones: `make gpu-tune`.

A variant is a change of sources, mostly of a row of tile_config.h, and the one kernel that it
concerns. All of them compile, and ptxas serialises no product of the Hopper kernels (its advice
C7510 to C7520). Tiles of keys that the present kernels do not have also need an instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from building.edits import Edit
from transformer_kernels.bench import Direction

Kernels = Literal["sm90", "sm80"]
TILES = "cuda/common/tile_config.h"


class Group(NamedTuple):
    """Kernels of one pass and width, whose variants are timed together."""

    kernels: Kernels
    direction: Direction
    """the pass, "fwd" or "bwd", that the changes concern"""
    D: int
    """width of q and k"""
    D_v: int

    def __str__(self) -> str:
        widths = dict.fromkeys((f"{self.D}", f"{self.D_v}"))
        return "-".join([self.kernels, self.direction, *widths])


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """A change of the kernels for one width in bfloat16."""

    group: Group
    change: str
    """what distinguishes it within the group"""
    edits: tuple[Edit, ...]

    @property
    def name(self) -> str:
        return f"{self.group}-{self.change}"

    def __str__(self) -> str:
        return self.name

    @property
    def unit(self) -> str:
        """Name of the unit of kernels that is recompiled (building/cuda.py)."""
        kernels, _, D, D_v = self.group
        return f"bfloat16-{D}-{D_v}" if kernels == "sm90" else f"bfloat16-{max(D, D_v)}"


def _wgmma(columns: int) -> tuple[Edit, ...]:
    """Adds a product of 64 x `columns` to those that sm90_wgmma.h has."""
    registers = columns // 2
    names = ", ".join(f"%{i}" for i in range(registers))
    outputs = ", ".join(f"TK_C4({i})" for i in range(0, registers, 4))
    operands = ", ".join(f"{registers + i}" for i in range(7))
    first = "TK_WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21, 22)"
    added = (
        f"#define TK_OUTPUTS_{columns} {outputs}\n"
        f'#define TK_NAMES_{columns} "{names}"\n'
        f"TK_WGMMA_BOTH({columns}, {operands})\n"
    )
    last = "kCount == 96 || kCount == 128"
    return (
        Edit("cuda/platform/sm90_wgmma.h", first, added + first),
        Edit("emulator/cuda/platform/sm90_wgmma.h", last, f"{last} || kCount == {registers}"),
    )


def _hopper_forward(D: int, change: str, old: str, new: str, *more: Edit) -> KernelVariant:
    group = Group("sm90", "fwd", D, D)
    return KernelVariant(group=group, change=change, edits=(Edit(TILES, old, new), *more))


def _hopper_forward_64(change: str, row: str) -> KernelVariant:
    old = "if (width <= 64) return {3, 128, 2, 2, 32, 160};   // 113 KiB"
    return _hopper_forward(64, change, old, f"if (width <= 64) return {row}")


def _hopper_forward_128(change: str, row: str, *more: Edit) -> KernelVariant:
    old = "if (width <= 128) return {2, 128, 2, 2, 40, 232};  // 193 KiB"
    return _hopper_forward(128, change, old, f"if (width <= 128) return {row}", *more)


def _more_keys_128(keys: int, kib: int) -> KernelVariant:
    """One tile of q instead of two, and as many keys as registers or shared memory allow."""
    row = f"{{2, {keys}, 2, 1, 24, 240}};  // {kib} KiB"
    return _hopper_forward_128(f"{keys}-keys", row, *_wgmma(keys))


def _sm80_forward(D: int, change: str, row: str) -> KernelVariant:
    """A variant for widths of 64 or 128."""
    condition, tile = {
        64: ("if (width > 32 && width <= 64)", "{128, 128, 4};"),
        128: ("if (width <= 128)", "{128, 64, 4};"),
    }[D]
    edit = Edit(TILES, f"{condition} return {tile}", f"{condition} return {row}")
    return KernelVariant(group=Group("sm80", "fwd", D, D), change=change, edits=(edit,))


KERNEL_VARIANTS = (
    _more_keys_128(144, 177),
    _more_keys_128(160, 193),
    _more_keys_128(176, 209),
    _hopper_forward_128("3-stages", "{2, 128, 3, 1, 40, 232};  // 225 KiB"),
    _hopper_forward_64("2-consumers", "{2, 128, 2, 2, 40, 232};   // 97 KiB"),
    _hopper_forward_64("192-keys", "{2, 192, 2, 2, 40, 232};   // 129 KiB"),
    _hopper_forward(
        256,
        "80-keys",
        "return {2, 64, 2, 1, 40, 232};                     // 193 KiB",
        "return {2, 80, 2, 1, 24, 240};                     // 225 KiB",
        *_wgmma(80),
    ),
    KernelVariant(
        group=Group("sm80", "bwd", 64, 64),
        change="64-queries",
        edits=(
            Edit(
                TILES,
                "if (width <= 64) return {128, 128, 8, 4, 4, 4, 2};  // 160 KiB",
                "if (width <= 64) return {64, 128, 8, 2, 4, 2, 2};   // 96 KiB",
            ),
        ),
    ),
    _sm80_forward(128, "128-keys", "{128, 128, 8};"),
    _sm80_forward(128, "8-warps", "{128, 64, 8};"),
    _sm80_forward(128, "64-queries", "{64, 64, 4};"),
    _sm80_forward(64, "64-keys", "{128, 64, 4};"),
    _sm80_forward(64, "96-keys", "{128, 96, 4};"),
)
