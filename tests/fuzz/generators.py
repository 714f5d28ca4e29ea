"""The generators of calls, by name."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis.strategies import SearchStrategy

from tests.fuzz.call import Call
from tests.fuzz.hostile.calls import hostile_calls
from tests.fuzz.valid.bits import bits_calls
from tests.fuzz.valid.draw import decode, dense, linear, sdpa, valid_calls, varlen

Generators = dict[str, Callable[[], SearchStrategy[Call]]]


def _cpu() -> SearchStrategy[Call]:
    """Nearly half of the calls are of `attention`, which has the most options."""
    return valid_calls("cpu", dense, dense, dense, varlen, decode, sdpa, linear)


GENERATORS: Generators = {
    "cpu": _cpu,
    "cuda": lambda: valid_calls("cuda", dense, dense, varlen, decode, linear),
    "triton": lambda: valid_calls("triton", dense, varlen, linear),
    "reference": lambda: valid_calls("reference", dense, varlen, decode, linear),
    "bits": lambda: bits_calls(("cpu", "cpu", "cpu", "cpu", "cuda", "triton")),
    "hostile": lambda: hostile_calls(("auto", "cpu", "auto", "cpu", "reference", "cuda", "triton")),
}
"""The emulator runs "cuda", Triton's interpreter "triton". "reference" guards the oracle: both are
plain torch, written apart."""
SANITIZED: Generators = {
    "cpu": _cpu,
    "bits": lambda: bits_calls(("cpu",)),
    "hostile": lambda: hostile_calls(("auto", "cpu")),
}
"""Generators of calls of the extension: sanitizers see nothing of the other backends."""


def generators(sanitize: bool) -> Generators:
    """Returns the generators to run with the normal extension, or with the sanitized one."""
    return SANITIZED if sanitize else GENERATORS
