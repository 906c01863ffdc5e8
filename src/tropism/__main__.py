"""`python -m tropism`, and so `torchrun -m tropism`."""

import sys

from tropism.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
