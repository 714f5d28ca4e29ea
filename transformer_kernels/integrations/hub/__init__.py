"""Kernels for HuggingFace's library `kernels`: the public functions of the copies that
building/hub.py writes."""
