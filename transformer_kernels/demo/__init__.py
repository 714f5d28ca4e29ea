"""Demo of fused attention on this machine, with tables and pictures: `run_demo`."""

from transformer_kernels.demo.report import run_demo
from transformer_kernels.demo.settings import FULL, QUICK, DemoSettings

__all__ = ["FULL", "QUICK", "DemoSettings", "run_demo"]
