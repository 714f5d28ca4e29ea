"""Adapters that put the operators behind the interfaces of other packages."""
