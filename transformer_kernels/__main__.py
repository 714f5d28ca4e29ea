"""Entry point of `python -m transformer_kernels`."""

import sys

from transformer_kernels.cli import main

sys.exit(main())
