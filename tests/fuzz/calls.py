"""All calls that the fuzzer knows, and the source of one turned into the call."""

from __future__ import annotations

from tests.fuzz import faulty
from tests.fuzz.call import Call, PlainValues
from tests.fuzz.hostile import calls as hostile
from tests.fuzz.valid import attention, bits, decode, masks, relative, sdpa, varlen

_MODULES = (attention, bits, decode, faulty, hostile, masks, relative, sdpa, varlen)
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
