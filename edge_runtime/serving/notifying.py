"""Tells the service manager how a box is (sd_notify): ready, alive, reloading, stopping; does nothing without one."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping

READY, RELOADING, STOPPING, ALIVE = "READY=1", "RELOADING=1", "STOPPING=1", "WATCHDOG=1"


class Notifier:
    """Sends states to the socket that systemd names in the environment; a manager that is gone is passed over."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # a name without a file
            self._address = "\0" + self._address[1:]
        self.is_gone = False
        """Whether who started this process, at an address that ends with it (`gemel run --supervise`), has ended."""
        every = environment.get("WATCHDOG_USEC", "")
        self.alive_every_s = int(every) / 3e6 if every.isascii() and every.isdigit() and int(every) > 0 else None
        """How often `ALIVE` is to be sent, a third of what the manager waits for; None where it does not wait."""

    def tell(self, *states: str) -> None:
        """Send these states, lines such as `READY` or `STATUS=...`."""
        if not self._address:
            return
        with contextlib.suppress(OSError), self._noticing(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto("\n".join(states).encode(), self._address)

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except ConnectionRefusedError:
            self.is_gone = self._address.startswith("\0")
            raise
