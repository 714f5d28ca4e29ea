"""Calls of public functions, described by plain values: what the fuzzer draws and shrinks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tests.support.masks import PlainValues


class Call(PlainValues, ABC):
    """A call, whose repr reproduces it."""

    @abstractmethod
    def check(self) -> None:
        """Makes the call. Raises AssertionError if the result, or the error, is wrong."""
