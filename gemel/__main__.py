"""`python -m gemel`."""

import sys

from gemel.cli import main

sys.exit(main())
