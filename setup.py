"""Builds transformer_kernels._C with ninja: one shared object, every source with its own flags.

Without a C++ compiler the package installs as plain Python, without nvcc with the CPU's kernels
alone, and says what it lacks. A compiler that is there and fails is an error. MAX_JOBS, CXX,
CUDA_HOME, CUDA_PATH and TORCH_CUDA_ARCH_LIST are honoured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip runs this file without it
    from building.extension import BuildExtension

    setup(
        ext_modules=[Extension("transformer_kernels._C", sources=[])],
        cmdclass={"build_ext": BuildExtension},
    )
