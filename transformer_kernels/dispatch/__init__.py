"""Dispatch: the choice of a backend, its derivatives, and the fast path past torch's dispatcher."""
