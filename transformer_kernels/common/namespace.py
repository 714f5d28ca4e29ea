"""The namespace of the operators in `torch.ops`. A copy of the package has another one:
building/hub.py."""

NAMESPACE = "transformer_kernels"
