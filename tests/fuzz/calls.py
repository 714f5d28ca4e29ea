"""Calls of public functions, described by plain values: what the fuzzer draws and shrinks."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from tests.support.masks import PlainValues

Fault = Literal["none", "wrong", "error", "crash", "exit", "hang"]


class Call(PlainValues, ABC):
    """A call, whose repr reproduces it."""

    @abstractmethod
    def check(self) -> None:
        """Makes the call. Raises AssertionError if the result, or the error, is wrong."""


def parse(source: str) -> Call:
    """Returns the call whose repr is `source`. Its class must have been imported."""
    call = eval(source, {"__builtins__": {}}, _subclasses(PlainValues))
    if not isinstance(call, Call):
        raise ValueError(f"not a call: {source}")
    return call


def _subclasses(base: type[PlainValues]) -> dict[str, object]:
    found: dict[str, object] = {}
    for one in base.__subclasses__():
        found |= {one.__name__: one} | _subclasses(one)
    return found


@dataclass(frozen=True, kw_only=True, repr=False)
class Faulty(Call):
    """Fails on purpose, for the tests of the fuzzer."""

    fault: Fault

    def check(self) -> None:
        match self.fault:
            case "wrong":
                raise AssertionError("o: wrong")
            case "error":
                raise KeyError("o")
            case "crash":
                os.abort()
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(1000)
