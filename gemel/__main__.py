"""`python -m gemel`."""

import sys

from gemel.cli import main

if __name__ == "__main__":  # worker processes import this file again
    sys.exit(main())
