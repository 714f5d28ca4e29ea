import sys

from transformer_kernels.cli import main

sys.exit(main())
