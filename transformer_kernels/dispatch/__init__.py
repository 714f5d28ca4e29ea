"""Dispatch: the choice of a backend, autograd, autocast, and the CPU fast path."""
