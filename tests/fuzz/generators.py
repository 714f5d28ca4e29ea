"""The generators of calls, by name."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.call import Call
from tests.fuzz.hostile.calls import hostile_calls
from tests.fuzz.valid.attention import attention_calls
from tests.fuzz.valid.bits import bits_calls
from tests.fuzz.valid.decode import decode_calls
from tests.fuzz.valid.sdpa import sdpa_calls
from tests.fuzz.valid.varlen import varlen_calls

Generators = dict[str, Callable[[], SearchStrategy[Call]]]


def _cpu() -> SearchStrategy[Call]:
    """Half of the calls are of `attention`, which has the most options."""
    return st.one_of(
        attention_calls("cpu"), attention_calls("cpu"), attention_calls("cpu"),
        varlen_calls("cpu"), decode_calls("cpu"), sdpa_calls(),
    )  # fmt: skip


def _cuda() -> SearchStrategy[Call]:
    """The kernels run in the emulator."""
    return st.one_of(
        attention_calls("cuda"), attention_calls("cuda"), varlen_calls("cuda"), decode_calls("cuda")
    )


def _triton() -> SearchStrategy[Call]:
    """The kernels run in Triton's interpreter."""
    return st.one_of(attention_calls("triton"), varlen_calls("triton"))


def _reference() -> SearchStrategy[Call]:
    """Guards the oracle: both are plain torch, written apart."""
    return st.one_of(
        attention_calls("reference"), varlen_calls("reference"), decode_calls("reference")
    )


GENERATORS: Generators = {
    "cpu": _cpu,
    "cuda": _cuda,
    "triton": _triton,
    "reference": _reference,
    "bits": lambda: bits_calls(("cpu", "cpu", "cpu", "cpu", "cuda", "triton")),
    "hostile": lambda: hostile_calls(("auto", "cpu", "auto", "cpu", "reference", "cuda", "triton")),
}
SANITIZED: Generators = {
    "cpu": _cpu,
    "bits": lambda: bits_calls(("cpu",)),
    "hostile": lambda: hostile_calls(("auto", "cpu")),
}
"""Generators of calls of the extension: sanitizers see nothing of the other backends."""


def generators(sanitize: bool) -> Generators:
    """Returns the generators to run with the normal extension, or with the sanitized one."""
    return SANITIZED if sanitize else GENERATORS
