"""Builds transformer_kernels._C with ninja: one shared object, every source with its own flags.

Without a C++ compiler the package installs as pure Python. Without nvcc it installs with the CPU
kernels only. Both cases print what is missing. A compiler that is present and fails is an error.
MAX_JOBS, CXX, CUDA_HOME, CUDA_PATH and TORCH_CUDA_ARCH_LIST are honoured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip does not add this folder
    from building.extension import BuildExtension

    setup(
        ext_modules=[Extension("transformer_kernels._C", sources=[], py_limited_api=True)],
        cmdclass={"build_ext": BuildExtension},
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
