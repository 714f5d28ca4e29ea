"""Backends of csrc/, compiled into the extension `transformer_kernels._C`."""
