"""Helpers of every layer: checks of arguments and memory, private symbols of torch, names."""
