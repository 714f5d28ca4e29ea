"""The error of files that are not valid checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A file that is damaged, is not a checkpoint of this package, or does not match the run.

    The text is one line that names the entry which is absent or invalid.
    """
