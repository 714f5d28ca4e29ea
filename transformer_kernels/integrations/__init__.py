"""Adapters from the interfaces of other packages to the operators."""
