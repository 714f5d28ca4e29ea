"""Entry point of `python -m transformer_kernels`."""

import sys

from .cli import main

sys.exit(main())
