"""Build system of the extension, used by setup.py and the tests. Not part of the package."""
