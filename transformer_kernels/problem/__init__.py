"""Validated calls. Every error of a caller is raised here, before any kernel is launched."""

from .layout import Layout
from .types import Problem, Saved, Shape, shape_of, unpack

__all__ = ["Layout", "Problem", "Saved", "Shape", "shape_of", "unpack"]
