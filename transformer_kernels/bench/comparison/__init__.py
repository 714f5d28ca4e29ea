"""Comparison of implementations on a user's own calls: the command `bench`."""
