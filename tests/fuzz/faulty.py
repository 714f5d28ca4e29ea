"""Calls that fail on purpose, for the tests of the fuzzer."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Literal

from tests.fuzz.call import Call


@dataclass(frozen=True, kw_only=True, repr=False)
class Faulty(Call):
    fault: Literal["none", "wrong", "error", "crash", "exit", "hang"]

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
