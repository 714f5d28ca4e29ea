"""The cpu and cuda backends: kernels of csrc/, compiled into `transformer_kernels._C`."""
