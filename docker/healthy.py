"""Whether the box in this container is alive: the exit code says it to the container's HEALTHCHECK.

Asks `/healthz` of GEMEL_HTTP (http://127.0.0.1:8080), which needs no token.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request

TIMEOUT_S = 4

asked = urllib.request.Request(os.environ.get("GEMEL_HTTP", "http://127.0.0.1:8080") + "/healthz")
try:
    # The certificate names the box in its network, not the loopback.
    own = ssl._create_unverified_context()
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S, context=own) as answer:
        print(answer.read(100).decode(errors="replace").strip())
except (OSError, ValueError) as error:
    sys.exit(f"not healthy: {error}")
