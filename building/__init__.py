"""What setup.py builds the extension with: tools, units and ninja. Not part of the package."""
