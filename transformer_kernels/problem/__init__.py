"""Validated calls. Every error of a caller is raised here, before any kernel is launched."""

from transformer_kernels.problem.layout import Layout
from transformer_kernels.problem.types import Problem, Saved, Shape, shape_of, unpack

__all__ = ["Layout", "Problem", "Saved", "Shape", "shape_of", "unpack"]
