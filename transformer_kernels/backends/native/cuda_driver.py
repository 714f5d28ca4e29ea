"""The version of the CUDA driver, asked of the driver itself: torch has no public function."""

from __future__ import annotations

import ctypes

_LIBRARY = "libcuda.so.1"


def cuda_driver_version() -> tuple[int, int] | None:
    """Returns the CUDA version that the driver supports, such as (13, 0); None without a driver."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10
