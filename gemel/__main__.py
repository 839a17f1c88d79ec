"""`python -m gemel`."""

import contextlib
import os
import sys

with contextlib.suppress(OSError):  # a current folder that was removed
    if sys.path and os.path.abspath(sys.path[0]) == os.getcwd():
        # The current folder comes last: a models.py there is the user's, not Gemel's package.
        sys.path.append(sys.path.pop(0))

try:
    from gemel.cli import main
except KeyboardInterrupt:  # before the command line can catch it
    sys.exit(130)

if __name__ == "__main__":  # worker processes import this file again
    sys.exit(main())
