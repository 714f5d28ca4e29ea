"""Demo of fused attention on this machine, with tables and pictures: `run_demo`."""

from .report import run_demo
from .settings import FULL, QUICK, DemoSettings

__all__ = ["FULL", "QUICK", "DemoSettings", "run_demo"]
