"""`gemel run --supervise`: a parent that starts the box again when it ends in an error; it imports no torch.

For where no service manager does that. Decided by `again`, a function of how the box ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gemel.commands.outcome import BAD_INPUT, DONE, INTERRUPTED

READY = b"READY=1"
POLL_INTERVAL_S = 0.5
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
STEADY_S = 60.0
"""A box that ran so long before it failed is started again without delay."""
TIMEOUT_S = 8.0
"""A box that was told to stop has so long, then it is killed."""
SILENCE_S = 15.0
"""A box that has said that it serves and is not heard for so long hangs as a whole: it is killed, and starts again."""
FINAL = frozenset((DONE, BAD_INPUT, INTERRUPTED))

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, slots=True)
class Again:
    """Start the box again after so many seconds, the next time after `next_s` if it fails at once."""

    wait_s: float
    next_s: float


def again(code: int, ran_s: float, wait_s: float) -> Again | None:
    """What to do with a box that ended with this exit code (negative: by that signal) after so many seconds; None when
    that was its end: it was done, was asked to stop, or its config is bad, which no new start would mend.
    """
    if code in FINAL:
        return None
    if ran_s >= STEADY_S:
        return Again(0.0, FIRST_WAIT_S)
    return Again(wait_s, min(LONGEST_WAIT_S, 2 * wait_s))


def last(code: int, was_asked: bool) -> int:
    """The exit code to end with after a box that ended so: one that was asked to stop may not have listened yet."""
    if was_asked and -code in (signal.SIGTERM, signal.SIGINT):
        return DONE
    return code if code >= 0 else 128 - code


class Listener:
    """Hears from a box as a service manager does (sd_notify), at an address that its environment names."""

    def __init__(self) -> None:
        name = f"gemel-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{name}")
        self.environment = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": str(round(SILENCE_S * 1e6))}
        self.heard_at: float | None = None
        """When the box was last heard since it began to serve."""

    def listen(self) -> None:
        """Take what came."""
        with contextlib.suppress(BlockingIOError):
            while said := self._socket.recv(4096):
                if READY in said or self.heard_at is not None:
                    self.heard_at = time.monotonic()

    @property
    def hears_nothing(self) -> bool:
        """Whether a box that served is silent for too long."""
        return self.heard_at is not None and time.monotonic() - self.heard_at > SILENCE_S

    def close(self) -> None:
        self._socket.close()


def supervise(command: Sequence[str]) -> int:
    """Run the command of a box, again and again, until it ends well or is asked to; its last exit code.

    SIGTERM and SIGINT are handed on, SIGHUP too.
    """
    asked = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, _: object) -> None:
        if number != signal.SIGHUP:
            asked.set()
        if child is not None and child.poll() is None:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, hand_on)
    wait_s = FIRST_WAIT_S
    while True:
        started = time.monotonic()
        # In a session of its own, so that a terminal's Ctrl-C reaches it once, through here.
        with contextlib.closing(Listener()) as listener:
            child = subprocess.Popen(command, start_new_session=True, env={**os.environ, **listener.environment})
            if asked.is_set():  # while it was started
                child.send_signal(signal.SIGTERM)
            code = _ended(child, asked, listener)
        found = None if asked.is_set() else again(code, time.monotonic() - started, wait_s)
        if found is None:
            return last(code, asked.is_set())
        log.warning("the box ended with %s; it starts again in %.0f s", _told(code), found.wait_s)
        wait_s = found.next_s
        if asked.wait(found.wait_s):
            return DONE


def _ended(child: subprocess.Popen[bytes], asked: threading.Event, listener: Listener) -> int:
    """The exit code of a box, killed where it does not end though it was asked to, or hangs."""
    while True:
        was_asked = asked.is_set()
        try:
            return child.wait(TIMEOUT_S if was_asked else POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            listener.listen()
            if was_asked or listener.hears_nothing:
                log.error("the box does not end: it is killed" if was_asked else "the box hangs: it is killed")
                child.kill()


def _told(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
