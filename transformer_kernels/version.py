"""Package version. The build and the documentation read it from this file."""

__version__ = "0.2.0"
