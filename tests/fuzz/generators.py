"""The generators of calls, by name."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.attention import attention_calls
from tests.fuzz.bits import bits_calls
from tests.fuzz.call import Call
from tests.fuzz.decode import decode_calls
from tests.fuzz.sdpa import sdpa_calls
from tests.fuzz.varlen import varlen_calls


def cpu() -> SearchStrategy[Call]:
    """Calls of the CPU kernels; half of them are of `attention`."""
    return st.one_of(
        attention_calls("cpu"), attention_calls("cpu"), attention_calls("cpu"),
        varlen_calls("cpu"), decode_calls("cpu"), sdpa_calls(),
    )  # fmt: skip


def cuda() -> SearchStrategy[Call]:
    """Calls of the CUDA kernels, which run in the emulator."""
    return st.one_of(
        attention_calls("cuda"), attention_calls("cuda"), varlen_calls("cuda"), decode_calls("cuda")
    )


def triton() -> SearchStrategy[Call]:
    """Calls of the Triton kernels, which run in Triton's interpreter."""
    return st.one_of(attention_calls("triton"), varlen_calls("triton"))


def reference() -> SearchStrategy[Call]:
    """Calls of the reference, which guard the oracle."""
    return st.one_of(
        attention_calls("reference"), varlen_calls("reference"), decode_calls("reference")
    )


def bits() -> SearchStrategy[Call]:
    """Pairs of calls that promise equal bits; most are of the CPU kernels."""
    return bits_calls(("cpu", "cpu", "cpu", "cpu", "cuda", "triton"))


GENERATORS = {
    "cpu": cpu,
    "cuda": cuda,
    "triton": triton,
    "reference": reference,
    "bits": bits,
}
SANITIZED = ("cpu",)
"""Generators that call the extension: sanitizers see nothing of the others."""
