"""`python -m gemel`."""

import contextlib
import os
import sys

with contextlib.suppress(OSError):  # a current folder that was removed
    if sys.path and os.path.abspath(sys.path[0]) == os.getcwd():
        # It comes last: a models.py there is somebody's own, and no package of ours.
        sys.path.append(sys.path.pop(0))

import gemel
from gemel.cli import main

if __name__ == "__main__":  # worker processes import this file again
    gemel.check_packages()
    sys.exit(main())
