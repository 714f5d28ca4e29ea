"""Choice of a backend for a validated call, autograd, and fast paths."""

from . import operators  # noqa: F401 - torch then differentiates them
