"""All calls that the fuzzer knows, and the source of one turned into the call."""

from __future__ import annotations

from tests.fuzz import faulty
from tests.fuzz.call import Call
from tests.fuzz.hostile import calls as hostile
from tests.fuzz.valid import bits
from tests.fuzz.valid import call as valid
from tests.support import attention, cases, decode_cases, linear, masks, varlen_cases
from tests.support.masks import PlainValues

_MODULES = (
    attention,
    bits,
    cases,
    decode_cases,
    faulty,
    hostile,
    linear,
    masks,
    valid,
    varlen_cases,
)
_CLASSES = {
    name: value
    for module in _MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, PlainValues)
}


def parse(source: str) -> Call:
    """Returns the call whose repr is `source`."""
    call = eval(source, {"__builtins__": {}}, dict(_CLASSES))
    if not isinstance(call, Call):
        raise ValueError(f"not a call: {source}")
    return call
